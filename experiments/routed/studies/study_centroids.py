"""(g) Better centroids and better choices: second order, corrections learnt from past queries, oracles."""

from __future__ import annotations

from clusters import Clustering
from corrections import CHOICES, LOGITS, VALUES, attend_corrected
from variant import Variant

STUDY = "centroids"


def variants() -> list[Variant]:
    """One part corrected at a time, then pairs; at leaves of 64 only corrected logits."""
    logits = [("plain", name, "plain") for name in LOGITS]
    parts = [(name, "plain", "plain") for name in CHOICES[1:]] + [("plain", "plain", name) for name in VALUES[1:]]
    pairs = [("calibrated", "calibrated", "plain"), ("calibrated", "calibrated", "weighted")]
    pairs += [("true mass", "true mass", "plain"), ("true mass", "true mass", "true mean")]
    made = []
    for leaf, singles, tried in ((128, 1 / 128, logits + parts + pairs), (64, 1 / 128, logits)):
        for choice, logit, value in tried:
            clustering = Clustering(leaf=leaf, singles=singles)
            named = {"choice": choice, "logit": logit, "value": value}
            words = [f"{part} {name}" for part, name in named.items() if name != "plain"]
            label = f"leaf {leaf}, {'with' if singles else 'no'} singles: {', '.join(words) or 'plain'}"
            made.append(
                Variant(
                    STUDY,
                    label,
                    lambda view, _, clustering=clustering, named=named: attend_corrected(
                        view, clustering, **named
                    ),
                    {"leaf": leaf, "singles": singles, **named},
                )
            )
    return made
