"""What oracles share: when they pass a case over, how close is close, and what a configuration reads."""

from prescore import Exact, GaussianKMeans, Hyper, Routed, Selected

CLOSE = 1e-9
"""Of float64 results that differ by the order of sums."""
FLIPPED = 0.005
"""Share of queries that may differ where rounding flips a choice."""


class PassedOver(Exception):
    """The oracle does not apply to this case."""


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
    if isinstance(config, Selected):  # `min_score` may leave some out
        most = 1.0 if isinstance(config.top_k, float) else case.n_keys
        return config.top_k is not None and config.top_k >= most and config.inner == Exact()
    return True


def features_tie(case):
    """Whether k-means in random features meets equal keys.

    Products of equal rows differ by rounding, by their place in a matrix, so equal clusters share such keys in any
    way. A single normalized number is 1 or -1.
    """
    scorers = [getattr(case.config, name, None) for name in ("scorer", "remainder")]
    kernel = [scorer for scorer in scorers if isinstance(scorer, GaussianKMeans)]
    return bool(kernel) and (case.keys != "gaussian" or (case.dim == 1 and any(s.normalize for s in kernel)))
