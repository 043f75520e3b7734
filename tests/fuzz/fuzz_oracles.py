"""What must hold for any call, whichever engine runs it: an oracle asserts it, or passes a case over."""

import itertools
import math
import random
from dataclasses import replace
from unittest.mock import patch

import torch
from attention_checks import aligned_by_rank, check_oracle
from fuzz_cases import DTYPES
from oracles.budgets import assert_within, error_budget
from oracles.dense import dense_attention, full_weights
from routed_checks import check_routed

import prescore
from prescore import Coupling, Exact, GaussianKMeans, Hyper, KMeans, Lsh, Routed, Selected
from prescore.attention import Options
from prescore.errors import Unsupported
from prescore.integrations.decode import OVER_SELECTION, CachedKeys, LayerCache, keeps_selection
from prescore.routed import reference

STEPS = 1e-6, 1e-7, 1e-6, 1e-7
"""Of finite differences, each in a direction of its own. A wrong gradient is wrong in all of them; a choice that
one step flips, another may not."""
BEND = 1e-4
"""Of a step. The loss in the middle of two steps lies within this of their mean, unless a step flipped a choice:
then the difference is a jump and no slope."""
MASKS_AND_BLOCKS = (("exclude", "selected"), ("exclude", "all"), ("zero", "selected"))
WEIGHTS_AND_OVERLAPS = tuple(itertools.product(("selected", "all"), ("exclude", "count")))
COUPLINGS = [Coupling(m, *rest, b) for (m, b), rest in itertools.product(MASKS_AND_BLOCKS, WEIGHTS_AND_OVERLAPS)]
NATIVE_WIDTH = 16
"""Sizes that native code runs are multiples of this."""
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
        return config.exact_until >= case.n_keys if case.is_causal else case.n_query <= config.exact_until
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
    torch.rand(5)  # a moved global generator must not matter
    again, lse_again = case.run(tensors, mask, lse=True)
    torch.random.set_rng_state(state)
    assert torch.equal(again, output), "the same call must give the same bits"
    assert torch.equal(lse_again, lse)
    if output.numel():
        units = 64 * torch.finfo(case.dtype).eps * max(1, float(output.abs().max()))
        budget = 1e-10 if case.dtype == torch.float64 else units
        packed = [t.contiguous() for t in tensors]
        assert_within(case.run(packed, mask), output, budget, "output without stats, from contiguous tensors")


def dense(case):
    """Exact attention wherever the configuration reads everything, forward and backward."""
    need(reads_all(case) and not case.dropout_p)
    compare_exact(case)


def definition(case):
    """Algorithm 2 by its definition in loops, forward and backward, on few keys.

    The scorers have no ties: the definition runs them unbatched, where rounding may break a tie the other way.
    """
    need(isinstance(case.config, Selected | Hyper))
    draw = random.Random(f"{case.seed} definition")
    config = case.config.replace(min_seq_len=draw.choice((0, 1, 2, 4, 8)))
    if isinstance(config, Selected):
        coupling = draw.choice(COUPLINGS) if isinstance(config.inner, Lsh) else config.coupling
        remainder = "none" if coupling.mask == "zero" else draw.choice(("none", "centroids", KMeans(2)))
        scorer = draw.choice(("key-norm", "key-diff", "uniform"))
        config = config.replace(scorer=scorer, remainder=remainder, coupling=coupling)
    n_keys = min(case.n_keys, draw.choice((17, 40)))
    n_query = n_keys if case.n_query == case.n_keys else min(case.n_query, n_keys)
    case = replace(case, config=config, n_keys=n_keys, n_query=n_query, dtype=torch.float64, keys="gaussian")
    options = {"is_causal": case.is_causal, "seed": case.seed, "mask": case.padding()}
    selection = case.selection() if case.given else None
    check_oracle(config, case.tensors(), selection=selection, gradients=n_keys <= 17, **options)


def routed_definition(case):
    """Routed attention by its definition, one query at a time, forward and backward, on few keys."""
    need(isinstance(case.config, Routed) and not case.dropout_p and case.keys == "gaussian")
    n_keys = min(case.n_keys, 110)
    n_query = n_keys if case.n_query == case.n_keys else min(case.n_query, n_keys)
    case = replace(case, n_keys=n_keys, n_query=n_query, batch=min(case.batch, 2), dtype=torch.float64)
    mask = case.padding()
    need(mask is None or bool(mask.any(1).all()))
    options = {"is_causal": case.is_causal, "scale": case.scale, "backend": case.backend}
    check_routed(case.config, case.tensors(), mask=mask, **options)


def causality(case):
    """What comes after a position changes nothing up to it."""
    need(case.is_causal and case.n_keys > 1 and not case.given and not case.dropout_p)
    cut = random.Random(f"{case.seed} cut").randrange(case.n_keys - 1)
    assert_within(*_with_another_future(replace(case, dtype=torch.float64), cut), CLOSE, f"queries up to {cut}")


def _with_another_future(case, cut):
    """The output of queries up to a position, with other keys and values after it, and as it is."""
    tensors, other = case.tensors(), replace(case, seed=case.seed + 1, keys="gaussian").tensors()
    n_early = max(0, cut + 1 - (case.n_keys - case.n_query))
    # where queries are sorted, which weights are dropped depends on how, and so on later queries
    first = n_early if not aligned_by_rank(case.config) else case.n_query
    changed = [
        torch.cat((old[:, :, :begin], 30 * new[:, :, begin:]), 2)
        for old, new, begin in zip(tensors, other, (first, cut + 1, cut + 1), strict=True)
    ]
    return case.run(changed)[:, :, :n_early], case.run(tensors)[:, :, :n_early]


def batch_and_padding(case, flipped=FLIPPED):
    """A sequence alone gives what it gives in a batch, padded on any side, but for a share of the queries."""
    need(not case.dropout_p and not case.given and not features_tie(case))
    case = replace(case, dtype=torch.float64)
    tensors, mask = case.tensors(), case.padding()
    need(mask is not None or case.batch > 1)
    (output, lse), wrong = case.run(tensors, mask, lse=True), []
    for number in range(case.batch):
        alone = [t[number : number + 1] for t in tensors]
        row = None if mask is None else mask[number]
        if row is not None and not bool(row.any()):
            continue
        place, queries = _span(case, row), slice(None)
        if place is None:  # padding in between: the mask stays
            row_mask = None if row is None else row[None]
        else:
            row_mask, (first, last) = None, place
            alone[1:] = [t[:, :, first:last] for t in alone[1:]]
            if case.is_causal or case.n_query == case.n_keys:  # queries of padded keys are padding too
                past = case.n_keys - case.n_query
                queries = slice(max(0, first - past), last - past)
                alone[0] = alone[0][:, :, queries]
        options = {**case.options(), "key_padding_mask": row_mask, "return_aux": True}
        expected, aux = prescore.prescored_attention(*alone, case.config, **options)
        far = (expected - output[number : number + 1, :, queries]).abs().amax(-1)
        own_lse = lse[number : number + 1, :, queries]
        wrong.append(~((far <= CLOSE) & ((aux.lse == own_lse) | ((aux.lse - own_lse).abs() <= CLOSE))).flatten())
    if wrong:
        _few(torch.cat(wrong), "differ between a batch and its sequences alone", flipped)


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
        real = mask[:, None].expand(expected.shape[:3])
        budget = 1e-9 if case.dtype == torch.float64 else 1e-2
        for padded in (-2 * query + 1, torch.full_like(query, math.nan)):
            beside = case.run((torch.where(mask[:, None, :, None], query, padded), key, value), mask)[real]
            assert_within(
                beside.double(), expected[real].double(), budget, "real queries beside other padded ones"
            )


def backends_agree(case):
    """`plain` and `auto`."""
    need(not case.dropout_p and case.dtype in (torch.float64, torch.float32))
    case = replace(case, dtype=torch.float64)
    plain = case.run(lse=True, backend="plain")
    for result, expected in zip(case.run(lse=True, backend="auto"), plain, strict=True):
        assert_within(result, expected, 1e-8, "the automatic backend")


def last_queries(case):
    """The last queries alone = the end of the full call (identity 11)."""
    need(case.is_causal and case.n_query == case.n_keys and case.mask in ("none", "left") and not case.dropout_p)
    need(not aligned_by_rank(case.config) and not case.given)
    case = replace(case, dtype=torch.float64)
    query, key, value = case.tensors()
    count = random.Random(f"{case.seed} last").randrange(1, case.n_keys + 1)
    full = case.run((query, key, value))[:, :, -count:]
    assert_within(case.run((query[:, :, -count:], key, value)), full, CLOSE, f"the last {count} queries")


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
    step = LayerCache().step(last, CachedKeys(key, value, mask, case.n_keys), config, Options(generator=case.seed))
    assert routed or step.path == OVER_SELECTION
    need(step.result is not None)
    options = {"is_causal": routed, "key_padding_mask": mask, "generator": case.seed}
    expected = prescore.prescored_attention(last, key, value, config, **options)
    assert_within(step.result.output, expected, CLOSE, "a decode step")


def defaults(case):
    """torch's default dtype and default device change no bit of results and gradients, scores and selections."""
    tensors, options = case.tensors(), {**case.options(), "key_padding_mask": case.padding(), "return_aux": True}
    scorer = getattr(case.config, "scorer", "kmeans")
    inputs = [t.requires_grad_() for t in tensors]

    def results():
        output, aux = prescore.prescored_attention(*inputs, case.config, **options)
        scores = prescore.score(tensors[1].detach(), scorer, key_padding_mask=options["key_padding_mask"])
        chosen = prescore.select(tensors[1].detach(), scorer, top_k=5, sinks=2, recent=1)
        return output, aux.lse, scores, chosen.indices, *torch.autograd.grad(output.sum(), inputs)

    expected = results()
    default = DTYPES[case.seed % 4]
    try:
        torch.set_default_dtype(default)
        with torch.device("meta" if default == torch.float32 else "cpu"):
            found = results()
    finally:
        torch.set_default_dtype(torch.float32)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype, f"no dtype may follow the default, got {got.dtype}"
        assert torch.equal(got, wanted), f"no number may depend on the default {default}"


def gradients(case):
    """Finite, the same twice, none for padding, and those of a function that is linear in the values."""
    case = replace(case, dtype=torch.float64)
    mask = case.padding()
    inputs = list(case.tensors())
    if mask is not None and case.is_causal:  # a padded query may be anything too
        real = mask[:, case.n_keys - case.n_query :, None]
        inputs[0] = inputs[0].masked_fill(~real[:, None], torch.nan)
    inputs = [t.requires_grad_() for t in inputs]
    output = case.run(inputs, mask)
    grad = _cotangent(case, output)
    first = torch.autograd.grad(output, inputs, grad)
    second = torch.autograd.grad(case.run(inputs, mask), inputs, grad)
    for name, one, other in zip(("query", "key", "value"), first, second, strict=True):
        assert torch.isfinite(one).all(), f"the gradient of {name} must be finite"
        assert torch.equal(one, other), f"the gradient of {name} must be the same twice"
    if mask is not None:
        padded = ~mask[:, None, :, None]
        assert not (first[1] * padded).any(), "a padded key must have no gradient"
        assert not (first[2] * padded).any(), "a padded value must have no gradient"
    moved, expected = (first[2] * inputs[2]).sum(), (grad * output).sum()
    size = float((grad * output).detach().abs().sum()) + 1
    assert_within(moved[None], expected[None], 1e-9 * size, "the derivative along the values")


def slopes(case):
    """Gradients of output and lse are those of finite differences; small steps keep all choices."""
    need(case.keys == "gaussian")  # where keys are equal, a step chooses among equal clusters
    case = replace(case, dtype=torch.float64)
    mask, tensors = case.padding(), case.tensors()
    generator = torch.Generator().manual_seed(case.seed)
    inputs = [t.clone().requires_grad_() for t in tensors]
    with patch.object(reference, "LIGHT_WEIGHT", 1e-300):  # int8 logits have the gradients of exact ones
        _compare_slopes(case, mask, tensors, inputs, generator)


def _compare_slopes(case, mask, tensors, inputs, generator):
    loss = _loss(*case.run(inputs, mask, lse=True))
    expected = torch.autograd.grad(loss, inputs, materialize_grads=True)
    off = []
    for step in STEPS:
        ways = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in tensors]
        steps = ([t + sign * way for t, way in zip(tensors, ways, strict=True)] for sign in (step, -step))
        there, back = (float(_loss(*case.run(moved, mask, lse=True))) for moved in steps)
        found = (there - back) / (2 * step)
        slope = float(sum((grad * way).sum() for grad, way in zip(expected, ways, strict=True)))
        size = float(sum((grad * way).abs().sum() for grad, way in zip(expected, ways, strict=True)))
        if abs(found - slope) <= 1e-6 * (1 + size):
            return
        if abs(there + back - 2 * float(loss.detach())) <= BEND * step * (1 + size):
            off.append(f"{slope:.6g} instead of {found:.6g}")
    need(off)  # where scores are equal but for rounding, every step chooses anew
    raise AssertionError(f"slopes must be those of finite differences, got {', '.join(off)}")


def _loss(output, lse):
    """A number that feels every entry differently."""
    counted = torch.where(torch.isneginf(lse), 0.0, lse)
    weights = torch.arange(1.0, 1 + output.numel(), dtype=output.dtype).sin().view(output.shape)
    return (output * weights).sum() + (counted * weights[..., 0].cos()).sum()


def _fitting(case):
    """A case like this one that native code can run, long enough for far clusters."""
    need(isinstance(case.config, Routed) and case.dtype != torch.float64 and not case.dropout_p)
    sixteens = 1 + case.seed % 2
    sizes = {"cluster_size": NATIVE_WIDTH * sixteens, "chunk_size": NATIVE_WIDTH * (2 + case.seed % 3)}
    longer = 80 + NATIVE_WIDTH * sixteens
    n_query = case.n_query + (longer if case.n_query == case.n_keys or not case.is_causal else 0)
    dims = {"dim": NATIVE_WIDTH * (1 + case.dim % 3), "value_dim": NATIVE_WIDTH * (1 + case.value_dim % 2)}
    scale = None if case.scale is None else case.scale / 8  # float32 rounds logits of a hundred to 1e-5
    lengths = {"n_keys": case.n_keys + longer, "n_query": n_query}
    return replace(case, config=case.config.replace(**sizes), scale=scale, backend="auto", **lengths, **dims)


def native_agrees(case):
    """`native` and `plain`, in sizes that native code runs: results and gradients."""
    case = _fitting(case)
    # with equal weights rounding decides whether a query reads all keys or none
    need(case.scale != 0 and case.keys == "gaussian")
    mask, results = case.padding(), []
    for backend in ("native", "plain"):
        inputs = [t.requires_grad_() for t in case.tensors()]
        try:
            results.append((inputs, *case.run(inputs, mask, lse=True, backend=backend)))
        except Unsupported:  # there is no native code here
            need(False)
    (inputs, output, lse), (plain_inputs, expected, expected_lse) = results
    budget = 64 * torch.finfo(case.dtype).eps * max(1.0, float(expected.detach().abs().max()))
    apart = ~((output - expected).detach().abs().amax(-1) <= budget)
    apart |= ~(((lse - expected_lse).detach().abs() <= 1e-3) | (lse == expected_lse))
    _few(apart, "of native code differ from plain torch", max(FLIPPED, 1 / apart.numel()))
    found = torch.autograd.grad(output[~apart].float().sin().sum(), inputs)
    truth = torch.autograd.grad(expected[~apart].float().sin().sum(), plain_inputs)
    for name, got, wanted in zip(("query", "key", "value"), found, truth, strict=True):
        size = max(1.0, float(wanted.abs().max()))
        assert_within(got, wanted, 256 * torch.finfo(case.dtype).eps * size, f"gradient of {name}")


def native_causality(case):
    """What comes after a position changes nothing up to it, but by rounding."""
    need(case.is_causal)
    case = replace(_fitting(case), dtype=torch.float32, mask="none")
    case = replace(case, n_query=case.n_keys)
    cut = case.n_keys // 2 + case.seed % (case.n_keys // 2) - 1
    after, before = _with_another_future(case, cut)
    apart = ~((after - before).abs().amax(-1) <= 1e-4 * max(1.0, float(before.abs().max())))
    _few(apart, f"change with what comes after position {cut}", max(FLIPPED, 1 / apart.numel()))


def _few(apart, what, share):
    """At most a share of the queries is apart, where rounding flips a choice."""
    n_apart = int(apart.sum())
    assert n_apart <= share * apart.numel(), f"{n_apart} of {apart.numel()} queries {what}"


SPOILT = (
    *(lambda t: t[0], lambda t: t[None], lambda t: t.int(), lambda t: t[..., :0], lambda t: t.to("meta")),
    *(lambda t: t.to_sparse(), lambda t: t.tolist(), lambda t: None, lambda t: t.cfloat()),
    *(lambda t: torch.cat((t, t), 0)[:0], lambda t: t[:, :0]),
)
OPTIONS = ("is_causal", "scale", "dropout_p", "backend", "generator", "selection", "key_padding_mask")


def bad_input(case):
    """One thing wrong: a sentence of an allowed kind, and the inputs as they were."""
    draw = random.Random(f"{case.seed} bad")
    tensors, options = list(case.tensors()), {**case.options(), "key_padding_mask": case.padding()}
    need(all(t.numel() for t in tensors))
    wrong, number = draw.choice(["tensor", "tensor", "option", "not a number"]), draw.randrange(3)
    if wrong == "tensor":
        tensors[number] = draw.choice(SPOILT)(tensors[number])
    elif wrong == "not a number":
        tensors[max(1, number)][0, 0, -1, 0] = draw.choice([math.nan, math.inf, -math.inf])
        options["key_padding_mask"] = None
    else:
        odd = draw.choice(["yes", -1.5j, [], object(), math.nan, 10**400, torch.ones(2), {}])
        options[draw.choice(OPTIONS)] = odd
    strided = [t for t in tensors if isinstance(t, torch.Tensor) and not t.is_meta and t.layout == torch.strided]
    before = [t.clone() for t in strided]
    said = "" if wrong == "not a number" else "no error"
    try:
        prescore.prescored_attention(*tensors, case.config, **options)
    except (ValueError, TypeError) as error:  # Unsupported is a ValueError
        said = str(error)
    assert said, "what is no number must be refused, with a reason"
    assert "\n" not in said, f"an error must be one sentence, got {said}"
    assert len(said) < 600, f"an error must be short, got {len(said)} characters"
    for tensor, copied in zip(strided, before, strict=True):
        assert torch.equal(tensor.nan_to_num(), copied.nan_to_num()), "inputs must not change"


ANY_ENGINE = (dense, causality, batch_and_padding, padding_content, gradients, slopes, backends_agree)
DEFINITIONS = (definition, routed_definition)
ONE_ENGINE = (native_agrees, native_causality, last_queries, decode_step)
ORACLES = {oracle.__name__: oracle for oracle in (*ANY_ENGINE, *DEFINITIONS, *ONE_ENGINE, defaults, bad_input)}


def compare_exact(case):
    """A case against exact attention."""
    query, key, _ = replace(case, dtype=torch.float64).tensors()
    compare(case, full_weights(query, key, is_causal=case.is_causal, key_padding_mask=case.padding()))


def compare(case, weights):
    """Output, lse and gradients of a case against a dense softmax in float64."""

    def reference(query, key, value):
        return dense_attention(query, key, value, weights, scale=_scale(case))

    wide = [t.requires_grad_() for t in replace(case, dtype=torch.float64).tensors()]
    truth = reference(*wide)
    budget = error_budget(lambda *t: reference(*t).output, tuple(t.detach() for t in wide), case.dtype)
    inputs = [t.requires_grad_() for t in case.tensors()]
    output, lse = case.run(inputs, case.padding(), lse=True)
    # the budget rounds the inputs; sums and products inside are rounded too
    units = 32 * torch.finfo(case.dtype).eps * float(wide[2].detach().abs().max())
    assert_within(output, truth.output, max(4 * budget, 1e-9 if case.dtype == torch.float64 else units), "output")
    if case.dtype != torch.float64:
        return
    assert_within(lse, truth.lse, CLOSE, "lse")
    grad = _cotangent(case, output)
    found, expected = torch.autograd.grad(output, inputs, grad), torch.autograd.grad(truth.output, wide, grad)
    for name, got, wanted in zip(("query", "key", "value"), found, expected, strict=True):
        assert_within(got, wanted, 1e-8 * (1 + float(wanted.abs().max())), f"gradient of {name}")


def _scale(case):
    return case.dim**-0.5 if case.scale is None else case.scale


def _cotangent(case, output):
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(case.seed), dtype=output.dtype)


def _span(case, row):
    """Where a sequence's real keys lie, if they follow one another and its queries are known; else None."""
    if row is None:
        return 0, case.n_keys
    real = row.nonzero().squeeze(1)
    first, last = int(real[0]), int(real[-1]) + 1
    if last - first != len(real):
        return None
    at_the_end = last == case.n_keys or case.n_query == case.n_keys
    return (first, last) if not case.is_causal or at_the_end else None
