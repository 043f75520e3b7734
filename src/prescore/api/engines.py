"""The one place where a configuration's type becomes an engine."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from prescore import checks
from prescore.call import Call
from prescore.config import Config, Exact, Hyper, Routed, Selected
from prescore.exact import attend_to_all, visible_keys
from prescore.hyper import engine as selected
from prescore.ops.exact import exact_output
from prescore.routed import engine as routed
from prescore.types import Attended, Outcome


def run_engine(call: Call, config: Config, given: Tensor | None, explain: bool) -> Outcome:
    """The one place where a configuration's type becomes an engine."""
    if not call.query.shape[1]:
        return attend_to_all(call, explain=explain)  # no heads: there is nothing to choose for
    if isinstance(config, Routed):
        return _route(call, config, explain)
    if isinstance(config, Selected | Hyper):
        return selected.attend_selected(call, config, given, explain=explain)
    checks.instance("config", config, (Exact,))
    return attend_to_all(call, explain=explain)


def _route(call: Call, config: Routed, explain: bool) -> Outcome:
    """Routed attention; queries behind a sequence's end are no positions of its geometry, and run apart."""
    outcome = routed.attend_routed(call, config, explain=explain)
    padded = call.behind_the_end()
    if padded is None:
        return outcome
    own = routed.attend_routed(padded.call, config)
    return replace(outcome, attended=padded.put_into(outcome.attended, own.attended))


def _is_exact(call: Call, config: Config) -> bool:
    """Whether a call is exact attention as it stands, straight from the operator: short inputs feel every copy."""
    if call.padded or call.backend.dropout is not None:
        return False
    if isinstance(config, Routed):
        return routed.routes_nothing(call, config)
    if isinstance(config, Selected | Hyper):
        return selected.selects_nothing(call, config)
    return isinstance(config, Exact)


def _operator_alone(call: Call) -> Tensor:
    return exact_output(
        call.query, call.key, call.value, is_causal=call.is_causal, scale=call.scale, backend=call.backend
    )


def run_or_shortcut(call: Call, config: Config, explain: bool) -> Outcome:
    """Exact attention as it stands, where that is all a call asks for; else its engine."""
    if not explain and _is_exact(call, config):
        return Outcome(Attended(_operator_alone(call), call.query.new_empty(0)), visible_keys(call))
    return run_engine(call, config, None, explain)
