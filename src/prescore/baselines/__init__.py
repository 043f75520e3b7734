"""What one would use instead of pre-scoring, each behind the call shape of `prescored_attention`."""

from __future__ import annotations

from collections.abc import Callable

from prescore.baselines.heavy_hitters import heavy_hitter_attention
from prescore.baselines.lev_attention import lev_attention
from prescore.baselines.oracle import oracle_attention
from prescore.baselines.performer import performer_attention
from prescore.baselines.reformer import reformer_attention
from prescore.baselines.streaming import streaming_attention
from prescore.types import Attended

BASELINES: dict[str, Callable[..., Attended]] = {
    "lev-attention": lev_attention,
    "streaming": streaming_attention,
    "heavy-hitters": heavy_hitter_attention,
    "oracle": oracle_attention,
    "reformer": reformer_attention,
    "performer": performer_attention,
}
