"""What the paper prints. Its perplexities are 2 to a loss in nats: `nats` gives the loss back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Pair = tuple[float, float | None]
"""PPL and PPL* (with the blockwise flag); None = the paper has no such column."""

EXACT = 5.6
BUDGETS = (0, 32, 128, 512, 2048, 8192, 16384)
GAUSSIAN_BUDGETS = (0, 32, 128, 512, 1024, 2048, 4096, 8192, 16384)
TABLE_1 = {(False, False): 17.54, (False, True): 13.41, (True, False): 10.38, (True, True): 9.53}
"""By whether k-means selects, and by the blockwise flag."""


def _column(ppl: Sequence[float], flagged: Sequence[float] = ()) -> dict[int, Pair]:
    if flagged:
        return dict(zip(BUDGETS, zip(ppl, flagged, strict=True), strict=True))
    return {budget: (value, None) for budget, value in zip(GAUSSIAN_BUDGETS, ppl, strict=True)}


GRID: dict[tuple[str, int], Mapping[int, Pair]] = {
    ("kmeans", 256): _column(
        (17.5419, 17.3717, 15.7498, 11.7709, 10.3837, 10.5371, 11.9027),
        (13.4143, 14.2691, 14.7510, 10.3013, 10.0160, 9.5313, 10.7297),
    ),
    ("kmeans", 0): _column(
        (10.4122, 10.4014, 10.9531, 11.1941, 12.1078, 23.7752, 27.1459),
        (8.3081, 8.3460, 8.3633, 8.6657, 9.3075, 12.3623, 21.9300),
    ),
    ("kmedian", 256): _column(
        (17.5435, 17.5589, 15.1726, 12.6928, 10.4396, 10.5228, 12.0311),
        (13.4139, 14.3638, 14.2688, 10.7822, 10.6784, 9.6705, 10.6668),
    ),
    ("kmedian", 0): _column(
        (10.4122, 10.5020, 10.6929, 10.9729, 11.6279, 20.9296, 22.5637),
        (8.3081, 8.3319, 8.3912, 8.5140, 8.9240, 12.3335, 18.5101),
    ),
    ("leverage", 256): _column(
        (17.5428, 21.3402, 21.3568, 15.0292, 11.4189, 10.6066, 12.1050),
        (13.4129, 15.7013, 17.0048, 13.4522, 9.8549, 9.4091, 10.5868),
    ),
    ("leverage", 0): _column(
        (10.4122, 10.6251, 11.1715, 11.4453, 12.3255, 23.7757, 30.7175),
        (8.3081, 8.4462, 8.4504, 8.6360, 9.1102, 13.4991, 28.9817),
    ),
    ("gaussian-kmeans", 256): _column(
        (17.5410, 18.5715, 19.6897, 15.6162, 14.3289, 11.8682, 10.5833, 10.0670, 11.8495)
    ),
    ("gaussian-kmeans", 0): _column(
        (10.4122, 10.7094, 11.6935, 11.2801, 11.8827, 13.6853, 17.6743, 22.8829, 34.6969)
    ),
}
"""Appendices A and I: by scorer and residual samples, by budget."""

TOP_1 = {
    "ViT-S/16 (exact 85.11), kmeans, 4 clusters": {32: "31.34", 64: "61.31", 96: "74.21", 128: "80.05"},
    "ViT-S/16 (exact 85.11), kmeans, 6 clusters": {128: "80.49"},
    "ViT-S/16 (exact 76.47), leverage": {32: "13.3"},
    "ViT-S/16 (exact 76.47), key-norm": {32: "3.3"},
    "ViT-L/16 (exact 85.85), kmeans, 4 clusters": {32: "53.05", 64: "78.10", 96: "82.89", 128: "84.46"},
    "ViT-L/16 (exact 85.85), kmeans, 6 clusters": {128: "84.46"},
    "ViT-L/16 (exact 78.83), leverage": {32: "48.58"},
    "ViT-L/16 (exact 78.83), key-norm": {32: "8.9"},
}
"""Top-1 of zero-shot substitution by keys: Table 2 and, for leverage and key norm, Appendix E (marked *)."""

COVERAGE = {
    ("kmeans", 32): ("22.57", "43.89", "43.83", "15.62"),
    ("kmeans", 64): ("40.89", "69.07", "69.89", "32.81"),
    ("kmeans", 128): ("70.54", "87.79", "88.15", "65.62"),
    ("kmedian", 32): ("22.56", "43.91", "43.81", "18.75"),
    ("kmedian", 64): ("40.22", "64.69", "69.74", "32.81"),
    ("kmedian", 128): ("69.54", "81.87", "87.64", "65.62"),
}
"""Appendix G, ViT-Base: median coverage at 0.01, 0.1, 0.3, and mean coverage of the top columns."""
IMAGE_TOKENS = 197
"""Tokens of the paper's vision models; a budget out of another number is not comparable."""


def nats(printed: float) -> float:
    """The mean loss behind a printed perplexity."""
    return math.log2(printed)


def above_exact(printed: float | None) -> float | None:
    """The paper's loss above its exact attention."""
    return None if printed is None else nats(printed) - nats(EXACT)
