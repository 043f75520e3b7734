"""What must hold for any call, whatever engine answers it: an oracle asserts it, or passes a case over."""

import math
import random
from dataclasses import replace

import torch
from fuzz_bad_inputs import bad_input
from fuzz_compiled import compiled_agrees, compiled_causality
from fuzz_gradients import gradients, slopes
from fuzz_terms import CLOSE, FLIPPED, aligned_by_rank, features_tie, need, reads_all
from oracles.budgets import assert_within, error_budget
from oracles.dense import dense_attention, full_weights, subset_weights

import prescore
from prescore import Coupling, Exact, Routed, Selected
from prescore.integrations.decode import OVER_SELECTION, CachedKeys, LayerCache, Request, keeps_selection


def basics(case):
    """Shape, dtype, finite numbers, blind rows, inputs and global state untouched, the same bits twice."""
    tensors, mask = case.tensors(), case.padding()
    before = [t.clone() for t in tensors]
    state = torch.random.get_rng_state()
    output, lse = case.run(tensors, mask, lse=True)
    assert torch.equal(torch.random.get_rng_state(), state), "the global random state must not move"
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True)), "inputs must not change"
    query, key, value = tensors
    assert output.shape == (*query.shape[:3], value.shape[-1]), f"output must have its shape, got {output.shape}"
    assert output.dtype == query.dtype
    assert lse.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
    assert torch.isfinite(output).all(), "output must be finite"
    blind = torch.isneginf(full_weights(query, key, is_causal=case.is_causal, key_padding_mask=mask).keys).all(-1)
    assert (output[blind] == 0).all(), "a query that sees nothing must have output 0"
    assert torch.isneginf(lse[blind]).all(), "a query that sees nothing must have lse -inf"
    again, lse_again = case.run(tensors, mask, lse=True)
    assert torch.equal(again, output), "the same call must give the same bits"
    assert torch.equal(lse_again, lse)
    budget = (
        1e-10 if case.dtype == torch.float64 else 64 * torch.finfo(case.dtype).eps * max(1, output.abs().max())
    )
    if output.numel():
        assert_within(case.run(tensors, mask), output, float(budget), "output without statistics")


def dense(case):
    """Exact attention wherever the configuration reads everything, forward and backward."""
    need(reads_all(case) and not case.dropout_p)
    wide, mask = replace(case, dtype=torch.float64).tensors(), case.padding()
    scale = case.dim**-0.5 if case.scale is None else case.scale
    weights = full_weights(*wide[:2], is_causal=case.is_causal, key_padding_mask=mask)

    def reference(query, key, value):
        return dense_attention(query, key, value, weights, scale=scale)

    _compare(case, reference, mask)


def chosen_keys(case):
    """A given selection: exact attention over those keys."""
    config = case.config
    need(case.given and not case.is_causal and not case.dropout_p and isinstance(config, Selected))
    need(config.inner == Exact() and config.remainder == "none" and config.coupling.mask == "exclude")
    need(not config.min_fraction)
    wide, mask, chosen = replace(case, dtype=torch.float64).tensors(), case.padding(), case.selection()
    member = torch.zeros(wide[1].shape[:3], dtype=torch.bool).scatter(2, chosen.indices, chosen.valid)
    weights = subset_weights(full_weights(*wide[:2], key_padding_mask=mask), member)
    scale = case.dim**-0.5 if case.scale is None else case.scale
    _compare(case, lambda q, k, v: dense_attention(q, k, v, weights, scale=scale), mask)


def causality(case):
    """What comes after a position changes nothing up to it."""
    # where queries are sorted, which weights are dropped depends on how, and so on later queries
    need(case.is_causal and case.n_keys > 1 and not case.given and not case.dropout_p)
    case = replace(case, dtype=torch.float64)
    draw = random.Random(f"{case.seed} cut")
    cut, tensors = draw.randrange(case.n_keys - 1), case.tensors()
    other = replace(case, seed=case.seed + 1, keys="gaussian").tensors()
    past = case.n_keys - case.n_query
    changed = [tensors[0].clone(), *(t.clone() for t in tensors[1:])]
    if not aligned_by_rank(case.config):
        changed[0][:, :, max(0, cut + 1 - past) :] = 3 * other[0][:, :, max(0, cut + 1 - past) :]
    for own, new in zip(changed[1:], other[1:], strict=True):
        own[:, :, cut + 1 :] = 5 * new[:, :, cut + 1 :]
    n_early = max(0, cut + 1 - past)
    before, after = case.run(tensors)[:, :, :n_early], case.run(changed)[:, :, :n_early]
    assert_within(after, before, CLOSE, f"rows up to position {cut}")


def batch_and_padding(case):
    """A sequence alone gives what it gives in a batch, padded on any side."""
    need(not case.dropout_p and not case.given and not features_tie(case))
    case = replace(case, dtype=torch.float64)
    tensors, mask = case.tensors(), case.padding()
    need(mask is not None or case.batch > 1)
    parallel_group, off, n_rows = case.run(tensors, mask), 0, 0
    for number in range(case.batch):
        own = [t[number : number + 1] for t in tensors]
        row = None if mask is None else mask[number]
        result = parallel_group[number : number + 1]
        if row is not None and not bool(row.any()):
            continue
        place = _span(case, row)
        if place is None:  # padding in between: the mask stays
            own_mask = None if row is None else row[None]
        else:
            own_mask, (first, last) = None, place
            own[1:] = [t[:, :, first:last] for t in own[1:]]
            if case.is_causal or case.n_query == case.n_keys:  # queries of padded keys are padding too
                queries = _queries(case, first, last)
                own[0], result = own[0][:, :, queries], result[:, :, queries]
        alone = prescore.prescored_attention(*own, case.config, key_padding_mask=own_mask, **case.options())
        wrong = ~((alone - result).abs().amax(-1) <= CLOSE)
        off, n_rows = off + int(wrong.sum()), n_rows + wrong.numel()
    assert off <= FLIPPED * n_rows, f"{off} of {n_rows} rows differ between a batch and its sequences alone"


def padded_queries(case):
    """Queries behind the end of a right-padded sequence see its real keys; exactly, where few are asked."""
    need(isinstance(case.config, Routed) and case.is_causal and not case.dropout_p)
    need(case.mask in ("right", "both"))
    case = replace(case, dtype=torch.float64, n_query=case.n_keys)
    mask = case.padding()
    after = torch.stack([torch.arange(case.n_keys) > (row.nonzero().max() if row.any() else -1) for row in mask])
    need(bool(after.any()))
    case = replace(case, config=case.config.replace(exact_until=int(after.sum(1).max()) + 1))
    query, key, value = case.tensors()
    scale = case.dim**-0.5 if case.scale is None else case.scale
    weights = full_weights(query, key, is_causal=True, key_padding_mask=mask)
    truth = dense_attention(query, key, value, weights, scale=scale)
    asked = after[:, None].expand(truth.lse.shape)
    output, lse = case.run((query, key, value), mask, lse=True)
    assert_within(output[asked], truth.output[asked], CLOSE, "padded queries")
    assert_within(lse[asked], truth.lse[asked], CLOSE, "lse of padded queries")


def padding_content(case):
    """Whatever padded keys and values hold, and real queries whatever padded ones hold."""
    mask = case.padding()
    need(mask is not None and not bool(mask.all()))
    query, key, value = case.tensors()
    expected = case.run((query, key, value), mask)
    shown = [t.masked_fill(~mask[:, None, :, None], hidden) for t, hidden in ((key, math.nan), (value, math.inf))]
    result = case.run((query, *shown), mask)
    assert torch.equal(result, expected), "padding may hold anything"
    if case.is_causal and case.n_query == case.n_keys and not case.dropout_p:
        other = torch.where(mask[:, None, :, None], query, -2 * query + 1)
        real = mask[:, None].expand(expected.shape[:3])
        moved = case.run((other, key, value), mask)[real]
        budget = 1e-9 if case.dtype == torch.float64 else 1e-2
        assert_within(moved.double(), expected[real].double(), budget, "real queries beside other padded ones")
        spoilt = case.run((query.masked_fill(~mask[:, None, :, None], math.nan), key, value), mask)[real]
        assert_within(spoilt.double(), expected[real].double(), budget, "real queries beside padded NaN")


def backends_agree(case):
    """The plain operator and the one that is chosen by itself."""
    need(not case.dropout_p and case.dtype in (torch.float64, torch.float32))
    case = replace(case, dtype=torch.float64)
    plain = case.run(lse=True, backend="plain")
    for result, expected in zip(case.run(lse=True, backend="auto"), plain, strict=True):
        assert_within(result, expected, 1e-8, "the automatic backend")


def pieces(case):
    """The last queries alone = the same rows of the whole call (identity 11)."""
    need(case.is_causal and case.n_query == case.n_keys and case.mask in ("none", "left") and not case.dropout_p)
    need(not aligned_by_rank(case.config) and not case.given)
    case = replace(case, dtype=torch.float64)
    query, key, value = case.tensors()
    count = random.Random(f"{case.seed} piece").randrange(1, case.n_keys + 1)
    whole = case.run((query, key, value))[:, :, -count:]
    assert_within(case.run((query[:, :, -count:], key, value)), whole, CLOSE, f"the last {count} rows")


def decode_step(case):
    """A step with fresh state = the call of that one query over all keys so far (identity 10)."""
    config = case.config
    routed = isinstance(config, Routed)
    need(routed or (keeps_selection(config) and not case.given))
    if isinstance(config, Selected):  # a step is exact over its selection
        coupling = Coupling(mask=config.coupling.mask)
        config = config.replace(inner=Exact(), leaf_inclusive=False, min_fraction=0.0, coupling=coupling)
    need(case.n_keys > 1 and not case.dropout_p and case.mask in ("none", "left") and case.scale is None)
    case = replace(case, dtype=torch.float64)
    query, key, value = case.tensors()
    mask = case.padding()
    need(mask is None or bool(mask[:, -1].all()))
    last = query[:, :, -1:]
    keys = CachedKeys(key, value, mask, case.n_keys)
    step = LayerCache().step(last, keys, Request(config, None, 0.0, case.seed))
    assert routed or step.path == OVER_SELECTION
    need(step.result is not None)
    expected = prescore.prescored_attention(
        last, key, value, config, is_causal=routed, key_padding_mask=mask, generator=case.seed
    )
    assert_within(step.result.output, expected, CLOSE, "a decode step")


ORACLES = {
    oracle.__name__: oracle
    for oracle in (
        dense,
        chosen_keys,
        causality,
        batch_and_padding,
        padded_queries,
        padding_content,
        gradients,
        slopes,
        backends_agree,
        compiled_agrees,
        compiled_causality,
        pieces,
        decode_step,
        bad_input,
    )
}


def _compare(case, reference, mask):
    """Output, lse and gradients of a case against a function in float64."""
    wide = [t.requires_grad_() for t in replace(case, dtype=torch.float64).tensors()]
    truth = reference(*wide)
    budget = error_budget(lambda *t: reference(*t).output, tuple(t.detach() for t in wide), case.dtype)
    own = [t.requires_grad_() for t in case.tensors()]
    output, lse = case.run(own, mask, lse=True)
    # the yardstick rounds the inputs; sums and products inside are rounded too
    least = (
        1e-9
        if case.dtype == torch.float64
        else 32 * torch.finfo(case.dtype).eps * float(wide[2].detach().abs().max())
    )
    assert_within(output, truth.output, max(4 * budget, least), "output")
    if case.dtype != torch.float64:
        return
    assert_within(lse, truth.lse, CLOSE, "lse")
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(case.seed), dtype=output.dtype)
    expected = torch.autograd.grad(truth.output, wide, grad)
    for name, got, wanted in zip(
        ("query", "key", "value"), torch.autograd.grad(output, own, grad), expected, strict=True
    ):
        assert_within(got, wanted, 1e-8 * (1 + float(wanted.abs().max())), f"gradient of {name}")


def _span(case, row):
    """Where a sequence's real keys lie, if they follow one another and its queries can be told; else None."""
    if row is None:
        return 0, case.n_keys
    real = row.nonzero().squeeze(1)
    first, last = int(real[0]), int(real[-1]) + 1
    if last - first != len(real):
        return None
    at_the_end = last == case.n_keys or case.n_query == case.n_keys
    return (first, last) if not case.is_causal or at_the_end else None


def _queries(case, first, last):
    """The real queries of a causal sequence."""
    past = case.n_keys - case.n_query
    return slice(max(0, first - past), last - past)
