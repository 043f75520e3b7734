"""Every item of the paper: what runs it, what that costs, and where its record is. Loads nothing slow."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from prescore.bench.tables import Table

LANGUAGE, PLANTED, VISION, COVERAGE, HEADS, SPEED, SWEEP, REUSE = (
    *("language", "planted", "vision", "coverage", "heads", "speed", "sweep", "reuse"),
)


@dataclass(frozen=True)
class Item:
    """An item of the paper.

    Attributes:
        name: The sub-command.
        paper: What it is in the paper.
        what: What it measures, one sentence.
        kind: Which options it has.
        time: What its record took on two cores.
        record: Folders below `experiments`, empty = none.
        topics: Of the planted model, all = empty.
    """

    name: str
    paper: str
    what: str
    kind: str
    time: str
    record: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()


_ITEMS = """
table1 | language | 9 min, 8192 tokens, 2 texts, 3 seeds | language/table1, language/table1-longbench
    Table 1; abstract (-n 131072) | Pre-scoring and the blockwise flag, one at a time and together.
table2 | vision | 190 min, 1000 images | vision/grid-1000
    Table 2; 84.46 % of section 1 | Top-1 of a pretrained ViT whose queries read some keys only.
figure-1 | speed | 8 min to 131,072 tokens | speed/long
    Figure 1 | Time of exact attention over that of the paper's methods, by length, mask and pass.
figure-glm3 | language | none yet; --coupling corrected: cells of appendix-a | language/appendix-a
    Figure GLM3, its observations | Loss and time against budget as its file runs: flag, blocks over all keys.
scoring | speed | 1 min | speed/scoring
    section 3: cost of scoring | Time of scorers by keys and dimensions, of the preset by budget and clusters.
reuse | reuse | 1 min, 1,280 tokens | language/reuse
    section 3: a selection reused in decoding | Loss of 256 steps whose keys are selected once, or again and again.
universal-set | language | 21 min, 1024 tokens | language/universal-set, selection
    section 2: universal set with HyperAttention inside | Loss of attention over keys of leverage at least eps.
planted | planted | 11 min, 20 seeds | planted
    section 4 and its appendices | Every claim on the planted model, and which scorer finds the planted keys.
theorem-1 | planted | 2 min, 20 seeds | planted | leverage
    Lemmas 1 and 2, Theorem 1 | Leverage separates signal from noise; the universal set at rho.
theorem-2 | planted | 1 min, 20 seeds | planted | clusters
    Theorem 2 | Optimal clusters are the planted groups.
corollary-1 | planted | 2 min, 20 seeds | planted | singleton, variance ratio
    Corollary 1 | Singletons are clusters of their own; D_min of the variance-ratio model.
claim-1 | planted | 8 min, 20 seeds | planted | l_p
    Claim 1 | l_p clustering and sensitivities.
appendix-a | language | 7 min, 1024 tokens | language/appendix-a
    Appendix A | Budget by residual samples by blockwise flag for k-means, k-median, leverage and Gaussian k-means.
appendix-b | planted | 3 s | planted | counterexample
    Appendix B | Without normalisation k-means loses the signal.
appendix-c | planted | 1 min, 20 seeds | planted | many clusters
    Appendix C | k = Theta(d / eps) clusters.
appendix-d | planted | 3 min, 5 seeds | planted | latent
    Appendix D | A latent subspace, rho, and k = O(d / rho) clusters.
appendix-e | vision | within table2 | vision/grid-1000
    Appendix E | Top-1 with leverage scores and key norms.
appendix-f | language | 7 min, 1024 tokens | language/appendix-f
    Appendix F, Figure GLM2 | The early coupling, each of its artefacts alone, and blocks over all keys.
appendix-g | coverage | 2 min, 20 images, 3 seeds | vision/coverage
    Appendix G | Share of the heavy attention entries, and of the heaviest columns, on selected keys.
appendix-h | heads | 3 min, 5 layers | selection
    Appendix H: cheaper and more robust clustering | What scorers and the universal set select on saved heads.
baselines | language | 81 min, 4096 and 8192 tokens | language/baselines
    Appendix H: other families | Every baseline, the paper's methods and the default at equal keys read.
appendix-i | language | 9 min, 1024 tokens | language/appendix-i
    Appendix I | Gaussian kernel k-means under the early coupling.
sweep | sweep | as many rows as given | language/sweep
    clusters, noise, delta, blocks, samples | Loss for all combinations: --set scorer.n_clusters=8,16.
"""
"""Two lines for an item: name, kind, time, records, topics; what it is in the paper, what it measures."""


def _read_items() -> dict[str, Item]:
    lines = [[cell.strip() for cell in line.split("|")] for line in _ITEMS.strip().splitlines()]
    items = {}
    for (name, kind, time, *more), (paper, what) in zip(lines[::2], lines[1::2], strict=True):
        record, topics = (tuple(filter(None, cell.split(", "))) for cell in (*more, "", "")[:2])
        items[name] = Item(name, paper, what, kind, time, record, topics)
    return items


ITEMS = _read_items()
TESTED = {
    "Algorithm 1, rules and fallback": "tests/scoring",
    "Algorithm 2, couplings": "tests/selected",
}
"""Items that are tests, and where these are in a clone."""


def find(name: str) -> Item:
    """An item by its name; any other word is refused with the nearest one."""
    if name not in ITEMS:
        close = difflib.get_close_matches(name, ITEMS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"item must be one of {', '.join(map(repr, ITEMS))}, got {name!r}{hint}")
    return ITEMS[name]


def listing() -> Table:
    """All items."""
    rows = [
        (item.paper, f"prescore paper {item.name}", item.time, ", ".join(item.record) or "no record")
        for item in ITEMS.values()
    ]
    rows += [(paper, f"pytest {folder}", "1 min", "no record") for paper, folder in TESTED.items()]
    note = (
        "time: what the record takes on a machine that does nothing else; every item has --quick; records are in "
        "experiments/ of a clone, and --resume --out experiments/RECORD continues one"
    )
    return Table(
        "The paper, item by item", ("in the paper", "command", "time", "record"), tuple(rows), note, left=4
    )
