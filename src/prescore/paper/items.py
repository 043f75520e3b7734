"""Every item of the paper: what runs it, what that costs, and where its record is. Loads nothing slow."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from prescore.bench.tables import Table

LANGUAGE, PLANTED, VISION, COVERAGE, HEADS, SPEED, SWEEP = (
    *("language", "planted", "vision", "coverage", "heads", "speed", "sweep"),
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


ITEMS = {
    item.name: item
    for item in (
        Item(
            "table1",
            "Table 1; abstract (-n 131072)",
            "Pre-scoring and the blockwise flag, one at a time and together.",
            LANGUAGE,
            "12 min, 8192 tokens, 2 texts",
            ("language/table1", "language/table1-longbench"),
        ),
        Item(
            "table2",
            "Table 2; 84.46 % of section 1",
            "Top-1 of a pretrained ViT whose queries read some keys only.",
            VISION,
            "190 min, 1000 images",
            ("vision/grid-1000",),
        ),
        Item(
            "figure-1",
            "Figure 1",
            "Time of exact attention over that of the paper's methods, by length, mask and pass.",
            SPEED,
            "8 min to 131,072 tokens",
            ("speed/long",),
        ),
        Item(
            "figure-glm3",
            "Figure GLM3, its three observations",
            "Loss and time against budget under the corrected coupling, with the blockwise flag as in its file.",
            LANGUAGE,
            "cells of appendix-a",
            ("language/appendix-a",),
        ),
        Item(
            "scoring",
            "section 3: cost of scoring",
            "Time of every scorer alone, by keys and dimensions, and of the preset by budget and clusters.",
            SPEED,
            "1 min",
            ("speed/scoring",),
        ),
        Item(
            "universal-set",
            "section 2: universal set with HyperAttention inside",
            "Loss of attention over keys of leverage at least eps.",
            LANGUAGE,
            "21 min, 1024 tokens",
            ("language/universal-set", "selection"),
        ),
        Item(
            "planted",
            "section 4 and its appendices",
            "Every claim on the planted model, and which scorer finds the planted keys.",
            PLANTED,
            "9 min, 3 seeds",
            ("planted",),
        ),
        Item(
            "theorem-1",
            "Lemmas 1 and 2, Theorem 1",
            "Leverage separates signal from noise; the universal set at rho.",
            PLANTED,
            "1 s",
            ("planted",),
            ("leverage",),
        ),
        Item(
            "theorem-2",
            "Theorem 2",
            "Optimal clusters are the planted groups.",
            PLANTED,
            "3 s",
            ("planted",),
            ("clusters",),
        ),
        Item(
            "corollary-1",
            "Corollary 1",
            "Singletons are clusters of their own.",
            PLANTED,
            "4 s",
            ("planted",),
            ("singleton",),
        ),
        Item("claim-1", "Claim 1", "l_p clustering and sensitivities.", PLANTED, "8 min", ("planted",), ("l_p",)),
        Item(
            "appendix-a",
            "Appendix A",
            "Budget by residual samples by blockwise flag for k-means, k-median, leverage and Gaussian k-means.",
            LANGUAGE,
            "60 min, 1024 tokens",
            ("language/appendix-a",),
        ),
        Item(
            "appendix-b",
            "Appendix B",
            "Without normalisation k-means loses the signal.",
            PLANTED,
            "3 s",
            ("planted",),
            ("counterexample",),
        ),
        Item(
            "appendix-c",
            "Appendix C",
            "k = Theta(d / eps) clusters.",
            PLANTED,
            "5 s",
            ("planted",),
            ("many clusters",),
        ),
        Item(
            "appendix-d",
            "Appendix D",
            "A latent subspace, rho, and k = O(d / rho) clusters.",
            PLANTED,
            "30 s",
            ("planted",),
            ("latent",),
        ),
        Item(
            "appendix-e",
            "Appendix E",
            "Top-1 with leverage scores and key norms.",
            VISION,
            "within table2",
            ("vision/grid-1000",),
        ),
        Item(
            "appendix-f",
            "Appendix F, Figure GLM2",
            "The early coupling, each of its artefacts alone, and blocks over all keys.",
            LANGUAGE,
            "7 min, 1024 tokens",
            ("language/appendix-f",),
        ),
        Item(
            "appendix-g",
            "Appendix G",
            "Share of the heavy attention entries, and of the heaviest columns, on selected keys.",
            COVERAGE,
            "4 min, 20 images",
            ("vision/coverage",),
        ),
        Item(
            "appendix-h",
            "Appendix H: cheaper and more robust clustering",
            "What scorers select on saved heads, and the universal set there.",
            HEADS,
            "3 min, 5 layers",
            ("selection",),
        ),
        Item(
            "baselines",
            "Appendix H: other families",
            "Every baseline, the paper's methods and the default at equal keys read.",
            LANGUAGE,
            "81 min, 4096 and 8192 tokens",
            ("language/baselines",),
        ),
        Item(
            "appendix-i",
            "Appendix I",
            "Gaussian kernel k-means under the early coupling.",
            LANGUAGE,
            "9 min, 1024 tokens",
            ("language/appendix-i",),
        ),
        Item(
            "sweep",
            "clusters, noise, delta, blocks, samples",
            "Loss for every combination of values: --set scorer.n_clusters=8,16 --set min_fraction=0,0.1.",
            SWEEP,
            "as many rows as given",
        ),
    )
}
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
        "time: what the record took on two cores; every item has --quick; records are in "
        "experiments/ of a clone, and --resume --out experiments/RECORD continues one"
    )
    return Table(
        "The paper, item by item", ("in the paper", "command", "time", "record"), tuple(rows), note, left=4
    )
