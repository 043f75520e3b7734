"""On a GPU a call starts its work and returns: nothing between its first and last kernel waits for a number.

Every engine and configuration runs forward and backward on a pretended device (`support/pretend_device.py`), whose
tensors hold CPU numbers and record what a GPU would have to be waited for: `item`, `nonzero`, masks as indices,
`unique`, copies between device and host. The results must be those of the CPU.
"""

from typing import NamedTuple

import pytest
import torch
from oracles.budgets import assert_within
from oracles.inputs import attention_tensors
from pretend_device import OnDevice, PretendDevice

import prescore
from prescore import Coupling, Exact, Hyper, KMeans, Leverage, Lsh, Minkowski, Routed, Selected
from prescore.routed.decode import StepAttention

FLOAT64 = 1e-10
"""Far above the rounding of float64, far below any wrong weight."""
LSH = Lsh(block_size=16, sample_size=8, n_projections=4)
RANK = LSH.replace(alignment="rank")
ROUTED = Routed(min_weight=1 / 64, cluster_size=32, chunk_size=64, sinks=4, exact_until=0)

REMAINING = {
    "devices.all_finite": "keys and values that are not finite are refused: one number of a call, before its work",
    "scoring.select.check_selection": "a given selection with an index out of range is refused, before any work",
    "scoring.select.selection_of": "min_score, given selections: the number of keys kept is data, and a shape",
    "scoring.select.select_keys": "min_score: where all keys are kept there are no centroids",
    "scoring.leverage._whitening_of": "leverage: torch checks its factors; heads of poor condition get others",
    "scoring.leverage._whitening_by_qr": "leverage: torch checks its factors",
    "selected.causal_grid.Queries.span": "a chunk of a padded prompt: sequences begin at other positions",
    "selected.plan.Plan.add": "padding, an Lsh without a causal mask: sequences with few queries are exact",
    "routed.attention._sequences": "padding, Routed: the host cuts a batch into sequences without padding",
    "routed.decode.StepAttention._attend_far": "decode steps, Routed: the number of keys read is kept as a float",
}
"""Functions that read a number from the device, and why. Without padding, with `top_k` and a scorer that factors
nothing, the first is the only one. The list must shrink."""


class Case(NamedTuple):
    config: object
    is_causal: bool = False
    reads: frozenset = frozenset()
    """Names of `REMAINING`, without the first."""
    options: dict = {}  # noqa: RUF012
    n_query: int = 150


def both(name, config, *reads, **options):
    """A configuration without and with a causal mask."""
    return {
        f"{name}, {kind}": Case(config, is_causal, frozenset(reads), options)
        for kind, is_causal in (("full", False), ("causal", True))
    }


KEPT = ("scoring.select.select_keys", "scoring.select.selection_of")
PADDED = frozenset({"routed.attention._sequences"})
WHITENING_BY_QR = "scoring.leverage._whitening_by_qr"
FACTORISED = {
    "leverage": frozenset({"scoring.leverage._whitening_of"}),
}
SELECTED = {"selected": True}
CASES = {
    **both("exact", Exact()),
    **both("exact, padded", Exact(), padded=True),
    **both("hyper", Hyper(LSH, min_seq_len=32)),
    **both("hyper by rank, sinks", Hyper(RANK, min_seq_len=32, sinks=4)),
    **both("hyper, few queries", Hyper(LSH, min_seq_len=256)),
    "hyper, padded, causal": Case(Hyper(LSH, min_seq_len=32), True, options={"padded": True}),
    "hyper, padded, full": Case(
        Hyper(LSH, min_seq_len=32), reads=frozenset({"selected.plan.Plan.add"}), options={"padded": True}
    ),
    **both("selected", Selected(top_k=20, min_seq_len=32)),
    **both("selected, a share", Selected(top_k=0.3, min_seq_len=32, recent=3)),
    **both("selected, delta", Selected(top_k=5, min_fraction=0.5, min_seq_len=32)),
    **both("selected, sampled", Selected(KMeans(noise=0.1), 20, selector="sample", min_seq_len=32)),
    **both("selected, padded", Selected(top_k=20, min_seq_len=32), padded=True),
    **both("paper", Selected.paper(top_k=40, min_seq_len=32, inner=RANK)),
    **both("paper, sinks", Selected.paper(top_k=40, min_seq_len=32, inner=LSH, sinks=4)),
    **both("early", Selected.early(top_k=40, min_seq_len=32, inner=RANK)),
    **both(
        "blocks of all",
        Selected.paper(top_k=40, sinks=2, inner=LSH, coupling=Coupling(blocks="all"), min_seq_len=32),
    ),
    **both("min_score", Selected(min_score=0.0, min_seq_len=32), *KEPT),
    **both("routed", ROUTED),
    **both("routed, odd clusters", ROUTED.replace(cluster_size=24, chunk_size=48)),
    "routed, padded, full": Case(ROUTED, reads=PADDED, options={"padded": True}),
    "routed, padded, causal": Case(ROUTED, True, PADDED, options={"padded": True}),
    **{
        f"scorer {name}": Case(Selected(name, 40, min_seq_len=32), reads=FACTORISED.get(name, frozenset()))
        for name in prescore.list_scorers()
    },
    "sketched leverage": Case(Selected(Leverage(sketch_size=32), 40), reads=frozenset({WHITENING_BY_QR})),
    "p of 1.5": Case(Selected(Minkowski(p=1.5, fit_size=64), 40)),
    "chunk of a prompt, routed": Case(ROUTED, True, n_query=40),
    "chunk of a prompt, selected": Case(Selected(top_k=20, min_seq_len=32), True, n_query=40),
    "chunk of a prompt, hyper": Case(Hyper(LSH, min_seq_len=32), True, n_query=40),
    "chunk of a padded prompt": Case(
        Selected(top_k=20, min_seq_len=32),
        True,
        frozenset({"selected.causal_grid.Queries.span"}),
        {"padded": True},
        n_query=40,
    ),
    "chunk of a padded prompt, routed": Case(
        ROUTED,
        True,
        PADDED,
        {"padded": True},
        n_query=40,
    ),
    "given selection": Case(
        None, reads=frozenset({"scoring.select.check_selection", "scoring.select.selection_of"}), options=SELECTED
    ),
}


def run(case, mode=None):
    """Output and gradients of a case, on the pretended device where there is a mode."""
    query, key, value = attention_tensors(
        batch=2, heads=4, kv_heads=2, n_query=case.n_query, n_keys=150, dim=8, value_dim=8, seed=3
    )
    options = {"is_causal": case.is_causal, "generator": 1, "backend": "plain", **case.options}
    put = (lambda t: t) if mode is None else mode.put
    if options.pop("padded", False):
        mask = torch.ones(2, 150, dtype=torch.bool)
        mask[1, :37] = False
        options["key_padding_mask"] = put(mask)
    if options.pop("selected", False):
        indices = torch.arange(0, 150, 3).expand(2, 2, -1).contiguous()
        options["selection"] = prescore.Selection(put(indices), put(torch.ones_like(indices, dtype=torch.bool)))
    inputs = [put(t.requires_grad_()) for t in (query, key, value)]
    output = prescore.prescored_attention(*inputs, case.config, **options)
    return [output, *torch.autograd.grad(output.square().sum(), inputs)]


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_for_the_device_but_what_is_listed(name):
    case, mode = CASES[name], PretendDevice()
    with mode:
        found = run(case, mode)
    assert {function for function, _ in mode.reads} == {"devices.all_finite", *case.reads}, sorted(mode.reads)
    for what, got, wanted in zip(("output", "query", "key", "value"), found, run(case), strict=True):
        assert isinstance(got, OnDevice)
        assert_within(got.numbers, wanted, FLOAT64, f"{what} of {name}")


def test_a_decode_step_reads_what_is_listed():
    query, key, value = attention_tensors(batch=1, heads=4, kv_heads=2, n_query=1, n_keys=500, dim=8, value_dim=8)
    steps, mode = [StepAttention(ROUTED, scale=0.5) for _ in range(2)], PretendDevice()
    expected = steps[0].attend(query, key, value, backend="plain")
    with mode:
        found = steps[1].attend(*(mode.put(t) for t in (query, key, value)), backend="plain")
    assert {function for function, _ in mode.reads} == {"routed.decode.StepAttention._attend_far"}
    assert_within(found.output.numbers, expected.output, FLOAT64, "a decode step")


def test_every_listed_read_occurs():
    occurring = frozenset({"devices.all_finite", "routed.decode.StepAttention._attend_far"})
    assert occurring.union(*(case.reads for case in CASES.values())) == set(REMAINING)


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.sum().item(),
        lambda t: bool(t.any()),
        lambda t: int(t[0]),
        lambda t: t.tolist(),
        lambda t: t.nonzero(),
        lambda t: t[t > 1],
        lambda t: t.unique(),
        lambda t: torch.where(t > 1),
        lambda t: t.masked_select(t > 1),
        lambda t: torch.equal(t, t),
        lambda t: t.cpu(),
        lambda t: torch.zeros(3).copy_(t),
        lambda t: torch.zeros(3).to(t.device),
        lambda t: torch.bincount(t.long()),
        lambda t: torch.repeat_interleave(t.long()),
        lambda t: torch.linalg.eigvalsh(torch.outer(t, t)),
    ],
)
def test_the_pretended_device_notices_every_way_to_wait(ask):
    mode = PretendDevice()
    with mode:
        tensor = mode.put(torch.arange(3.0))
        ask(tensor)
    assert len(mode.reads) >= 1


def test_the_pretended_device_lets_work_pass():
    mode = PretendDevice()
    with mode:
        tensor = mode.put(torch.arange(3.0))
        doubled = torch.where(tensor > 1, tensor * 2, tensor).sort(descending=True).values
        doubled[0] = torch.arange(1, device=tensor.device)[0]
    assert not mode.reads
    assert doubled.numbers.tolist() == [0, 1, 0]
