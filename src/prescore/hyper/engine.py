"""Attention over keys that were selected before any query was seen, as one call: plan, run, tell."""

from __future__ import annotations

from torch import Tensor

from prescore.call import Call
from prescore.config import Hyper, Selected
from prescore.hyper.plan import make_plan
from prescore.hyper.statistics import rows_per_query, statistics
from prescore.types import Outcome


def selects_nothing(call: Call, config: Selected | Hyper) -> bool:
    """Whether every query of a call without padding or a given selection reads every key it may see."""
    return call.is_causal and call.n_keys <= max(1, config.min_seq_len)


def attend_selected(
    call: Call, config: Selected | Hyper, given: Tensor | None = None, *, explain: bool = False
) -> Outcome:
    """Run Algorithm 2.

    Args:
        call: The aligned inputs.
        config: How keys are selected and attended to.
        given: `[B, Hkv, Nk]` bool, a selection to use instead of making one, in aligned positions.
        explain: Also tell what was selected and figures about it.
    """
    plan = make_plan(call, selecting(config), given)
    attended = plan.timed("attending", lambda: plan.run(call))
    parts, n_queries = plan.parts, call.query.shape[:3].numel()

    def count_rows() -> float:  # keeps row numbers alive, but no keys or values
        return rows_per_query(parts, n_queries)

    if not explain:
        return Outcome(attended, count_rows)
    return Outcome(attended, count_rows, plan.selections, statistics(call, plan, attended))


def selecting(config: Selected | Hyper) -> Selected:
    """HyperAttention over all keys is a selection that keeps every key."""
    if isinstance(config, Selected):
        return config
    return Selected(
        top_k=1.0,
        sinks=config.sinks,
        remainder="none",
        inner=config.lsh,
        min_seq_len=config.min_seq_len,
        leaf_inclusive=config.leaf_inclusive,
    )
