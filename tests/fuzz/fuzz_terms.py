"""What oracles share: when they pass a case over, how close is close, and what a configuration reads."""

from dataclasses import fields, is_dataclass

from prescore import Exact, GaussianKMeans, Hyper, Lsh, Routed, Selected
from prescore.errors import Unsupported

CLOSE = 1e-9
"""Of float64 results that differ by the order of sums."""
FLIPPED = 0.005
"""Share of rows that may differ where rounding flips a choice."""


class PassedOver(Exception):
    """The oracle has nothing to say about this case."""


def need(condition):
    """Pass a case over unless the condition holds."""
    if not condition:
        raise PassedOver


def reads_all(case):
    """Whether the configuration reads every key that a query may see."""
    config = case.config
    if case.given:
        return False
    if isinstance(config, Routed):
        return config.exact_until >= case.n_keys if case.is_causal else case.n_query < config.exact_until
    if isinstance(config, Selected | Hyper) and case.is_causal and config.min_seq_len >= case.n_keys:
        return True
    if isinstance(config, Hyper):
        return not case.is_causal and case.n_query < config.min_seq_len
    if isinstance(config, Selected):
        all_kept = config.top_k == 1.0 if isinstance(config.top_k, float) else config.top_k >= case.n_keys
        return all_kept and config.inner == Exact()
    return True


def features_tie(case):
    """Whether k-means in random features meets equal keys.

    Products of equal rows differ by rounding, by where they stand in a matrix, so that equal centres share such
    keys in any way. One number, normalized, is 1 or -1.
    """
    made = [getattr(case.config, name, None) for name in ("scorer", "remainder")]
    found = [scorer for scorer in made if isinstance(scorer, GaussianKMeans)]
    return bool(found) and (case.keys != "gaussian" or (case.dim == 1 and any(s.normalize for s in found)))


def aligned_by_rank(config):
    """Whether some part of a configuration is an `Lsh` aligned by rank, which sees all queries."""
    if isinstance(config, Lsh):
        return config.alignment == "rank"
    return is_dataclass(config) and any(aligned_by_rank(getattr(config, f.name)) for f in fields(config))


def refused(case, error):
    """Whether an error is a refusal with its reason: of a named backend, or of a tolerance with gradients."""
    asked = case.backend != "auto" or getattr(case.config, "tolerance", None) is not None
    return isinstance(error, Unsupported) and asked
