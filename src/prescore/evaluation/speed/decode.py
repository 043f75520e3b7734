"""How long one decode step takes over a kept selection, against one over the full cache."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from prescore.api.attention import prescored_attention
from prescore.config import Exact, Selected
from prescore.decoding.state import SelectionState
from prescore.evaluation.speed.check import check_output
from prescore.evaluation.speed.timing import EXACT, seconds
from prescore.records import Row
from prescore.values import Values


@dataclass(frozen=True)
class DecodeSetting:
    """One cache and how many steps over it are timed; every field goes into the record."""

    n: int
    top_k: int
    heads: int
    dim: int
    steps: int = 20


def decode_rows(settings: Sequence[DecodeSetting], seed: int) -> list[Row]:
    """Rows that time steps."""
    return [
        Row({"study": "decode", **asdict(setting)}, seed, partial(measure_decode, setting, seed), float(setting.n))
        for setting in settings
    ]


@torch.no_grad()
def measure_decode(setting: DecodeSetting, seed: int) -> Values:
    """Seconds of one decode step: over the kept rows, and exactly over the whole cache."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, setting.heads, setting.n, setting.dim)
    key, value = (torch.randn(shape, generator=generator) for _ in range(2))
    query = torch.randn(1, setting.heads, 1, setting.dim, generator=generator)
    config = Selected.paper("kmeans", setting.top_k, inner=Exact())
    state = SelectionState.select(key, value, None, config)
    wanted = prescored_attention(query, key, value, config)
    error = check_output(f"a decode step at n = {setting.n}", state.attend(query, None), wanted)
    times: dict[str, list[float]] = {EXACT: [], "selected": []}
    for _ in range(setting.steps):
        times[EXACT].append(seconds(lambda: scaled_dot_product_attention(query, key, value)))
        times["selected"].append(seconds(lambda: state.attend(query, None)))
    medians = {name: statistics.median(measured) for name, measured in times.items()}
    return {
        "seconds": medians,
        "spread": {name: max(measured) - min(measured) for name, measured in times.items()},
        "rows": state.n_rows,
        "speedup": medians[EXACT] / medians["selected"],
        "error": error,
    }
