"""`prescore.attend_keys`: keys that the caller lists, against a dense softmax over a written-out mask."""

import pytest
import torch
from oracles.budgets import assert_within, error_budget
from oracles.dense import dense_attention, without_centroids
from oracles.inputs import attention_tensors
from routed_checks import needs_native

import prescore
from prescore.errors import Unsupported
from prescore.ops import key_lists
from prescore.routed import native
from prescore.routed.native.library import levels_of_processor

N_QUERY, N_KEYS = 11, 23
LISTS = {"a query": N_QUERY, "a block of 4": 3, "a block of 2": 6, "all": 1}


def inputs(n_query=N_QUERY, kv_heads=2, dim=8, value_dim=5, **changes):
    sizes = {"n_query": n_query, "n_keys": N_KEYS, "dim": dim, "value_dim": value_dim}
    return attention_tensors(batch=2, heads=4, kv_heads=kv_heads, **sizes, **changes)


def lists(n_lists, n_heads, n_listed=7, seed=0):
    """Random keys in no order, some of them twice, some -1; one list is empty."""
    draw = torch.Generator().manual_seed(seed)
    indices = torch.randint(-3, N_KEYS, (2, n_heads, n_lists, n_listed), generator=draw).clamp_min(-1)
    indices[0, -1, -1] = -1
    return indices


def truth(query, key, value, indices, scale=None):
    """In float64, one list at a time."""
    batch, n_heads, n_query, dim = query.shape
    counts = torch.full((batch, n_heads, n_query, key.shape[2]), -torch.inf, dtype=torch.float64)
    per_list, per_head = -(-n_query // max(1, indices.shape[2])), n_heads // max(1, indices.shape[1])
    for b in range(batch):
        for head in range(n_heads):
            for position in range(n_query):
                for index in indices[b, head // per_head, position // per_list].tolist():
                    if index >= 0:
                        counts[b, head, position, index] = 0.0
    return dense_attention(
        query, key, value, without_centroids(counts), scale=dim**-0.5 if scale is None else scale
    )


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("n_heads", [2, 4], ids=["by KV head", "by query head"])
@pytest.mark.parametrize("shared_by", LISTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_listed_keys_are_read_once_and_no_others(dtype, shared_by, n_heads, backend, monkeypatch):
    monkeypatch.setattr(key_lists, "KEYS_AT_ONCE", 20)  # several gathers
    check_lists(inputs(), lists(LISTS[shared_by], n_heads), dtype, backend)


def check_lists(tensors, indices, dtype, backend):
    for scale in (None, -0.2, 0.0):
        found = prescore.attend_keys(*(t.to(dtype) for t in tensors), indices, scale=scale, backend=backend)
        wanted = truth(*tensors, indices, scale)
        for name in ("output", "lse"):

            def exact(*some, name=name, scale=scale):
                return getattr(truth(*some, indices, scale), name).nan_to_num(neginf=0.0)

            budget = error_budget(exact, tensors, dtype)
            assert_within(getattr(found, name), getattr(wanted, name), budget, name)
        assert found.output.dtype == dtype
        assert found.lse.dtype == (dtype if dtype == torch.float64 else torch.float32)
        assert bool((found.output[0, -1, -1] == 0).all())
        assert float(found.lse[0, -1, -1]) == -torch.inf


@needs_native
@pytest.mark.parametrize("level", levels_of_processor())
@pytest.mark.parametrize("n_heads", [2, 4], ids=["by KV head", "by query head"])
@pytest.mark.parametrize("shared_by", LISTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_native_code_reads_the_same_keys(dtype, shared_by, n_heads, level, monkeypatch):
    """Lists that few queries share, and many; sizes that pairs of bfloat16 can multiply, and others."""
    monkeypatch.setenv("PRESCORE_NATIVE", level)
    draw = torch.Generator().manual_seed(3)
    indices = lists(LISTS[shared_by], n_heads, n_listed=19)
    for dims in ((64, 32), (48, 80)):
        check_lists(inputs(dim=dims[0], value_dim=dims[1]), indices, dtype, "native")
    query, key, value = (tensor.to(dtype) for tensor in inputs(dim=32, value_dim=32))
    wanted = prescore.attend_keys(query, key, value, indices, backend="native")
    shuffled = indices[..., torch.randperm(19, generator=draw)].to(torch.int32)
    strided = [torch.cat((tensor, tensor), -1)[..., :32] for tensor in (query, key, value)]
    found = prescore.attend_keys(*strided, shuffled)  # what auto takes; another order of the lists
    for part, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(part, other, rtol=2**-7, atol=2**-7)


@needs_native
def test_lists_as_long_as_a_job_of_threads_and_longer():
    """Blocks of queries of several jobs, lists of several hundred keys, large logits."""
    draw = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(1, heads, 700, 32, generator=draw).double() for heads in (4, 2, 2))
    for n_lists, n_listed in ((1, 600), (3, 300), (50, 40), (700, 257)):
        indices = torch.randint(-1, 700, (1, 2, n_lists, n_listed), generator=draw)
        for factor in (1.0, 40.0):
            tensors = [
                (tensor * factor if i == 0 else tensor).float() for i, tensor in enumerate((query, key, value))
            ]
            found = prescore.attend_keys(*tensors, indices, backend="native")
            wanted = prescore.attend_keys(query * factor, key, value, indices)
            for part, exact in zip(found, wanted, strict=True):
                torch.testing.assert_close(part.double(), exact, rtol=1e-4, atol=2e-6 * factor)


@needs_native
def test_what_c_would_read_outside_of_is_refused():
    query, key, value = (tensor.float() for tensor in inputs(dim=16, value_dim=16))
    for wrong in (GOOD[:, :1], GOOD[:1], GOOD.float(), GOOD.repeat(1, 1, 2, 1)):
        with pytest.raises(ValueError, match="lists must belong to queries and keys, got"):
            native.attend_lists(query, key, value, wrong, 1.0)
    far = torch.tensor([N_KEYS, 2**31 + 1, -(2**40)]).expand(2, 2, N_QUERY, 3)  # `attend_keys` refuses them
    assert not native.attend_lists(query, key, value, far, 1.0).output.any()


@needs_native
def test_native_code_that_cannot_run_says_why():
    query, key, value = inputs(dim=16, value_dim=16)
    with pytest.raises(
        Unsupported, match=r"backend 'native' cannot run: it knows torch.float32, .* got torch.float64"
    ):
        prescore.attend_keys(query, key, value, GOOD, backend="native")
    with pytest.raises(Unsupported, match="the head dimension must be a multiple of 16 up to 256, got 8"):
        prescore.attend_keys(*(tensor.float() for tensor in inputs()), GOOD, backend="native")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_decode_step(dtype):
    """One query, the keys of a top-k in its order."""
    query, key, value = inputs(n_query=1, kv_heads=4)
    indices = (query @ key.transpose(-1, -2)).topk(9).indices.to(dtype)
    found = prescore.attend_keys(query, key, value, indices)
    for part, wanted in zip(found, truth(query, key, value, indices), strict=True):
        torch.testing.assert_close(part, wanted)


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("shared_by", LISTS)
def test_gradients(shared_by, backend):
    indices = lists(LISTS[shared_by], 2, n_listed=4)
    indices[indices == 0] = -1  # a key that nobody lists, and that fills lists up
    tensors = [tensor.requires_grad_() for tensor in inputs()]

    def both(*some):
        output, lse = prescore.attend_keys(*some, indices, backend=backend)
        return output, lse.nan_to_num(neginf=0.0)

    assert torch.autograd.gradcheck(both, tensors)
    output, lse = both(*tensors)
    _, key, value = torch.autograd.grad(output.square().sum() + lse.square().sum(), tensors)
    for grad in (key, value):
        assert bool((grad[:, :, 0] == 0).all())
        assert bool((grad != 0).any())


def test_every_key_is_exact_attention_and_parts_merge():
    query, key, value = inputs()
    every = torch.arange(N_KEYS).expand(2, 2, 1, N_KEYS)
    wanted = prescore.exact_attention(query, key, value)
    halves = [prescore.attend_keys(query, key, value, some) for some in every.split([9, 14], dim=-1)]
    for found in (prescore.attend_keys(query, key, value, every), prescore.merge(*halves)):
        for part, exact in zip(found, wanted, strict=True):
            torch.testing.assert_close(part, exact)


def test_a_long_list_costs_no_more_memory_than_a_short_one(monkeypatch):
    sizes = []
    gather = torch.Tensor.index_select
    monkeypatch.setattr(
        torch.Tensor, "index_select", lambda t, dim, rows: sizes.append(len(rows)) or gather(t, dim, rows)
    )
    monkeypatch.setattr(key_lists, "KEYS_AT_ONCE", 64)
    prescore.attend_keys(*inputs(), torch.arange(16).expand(2, 2, N_QUERY, 16))
    assert max(sizes) <= 64


@pytest.mark.parametrize("change", ["no keys listed", "no lists of no queries", "empty batch"])
def test_nothing_to_read(change):
    query, key, value = inputs()
    indices = torch.zeros(2, 2, N_QUERY, 0, dtype=torch.int64)
    if change == "no lists of no queries":
        query, indices = query[:, :, :0], indices[:, :, :0]
    if change == "empty batch":
        query, key, value, indices = (tensor[:0] for tensor in (query, key, value, indices))
    output, lse = prescore.attend_keys(query, key, value, indices)
    assert output.shape == (*query.shape[:3], 5)
    assert not output.any()
    assert bool((lse == -torch.inf).all())


GOOD = lists(N_QUERY, 2)
WRONG = [
    ([[1]], TypeError, "indices must be a torch.Tensor, got list"),
    (GOOD.float(), TypeError, "indices must be int64 or int32, got torch.float32"),
    (GOOD.bool(), TypeError, "indices must be int64 or int32, got torch.bool"),
    (GOOD[0], ValueError, r"indices must have shape \[2, 4 or 2, lists, keys\], got \(2, 11, 7\)"),
    (GOOD[:1], ValueError, r"indices must have shape .* got \(1, 2, 11, 7\)"),
    (GOOD[:, :1], ValueError, r"indices must have shape .* got \(2, 1, 11, 7\)"),
    (GOOD[:, :, :5], ValueError, r"a list for each of the 11 queries, or for each of n blocks .* got 5 lists"),
    (GOOD[:, :, :0], ValueError, r"indices must have a list for .* got 0 lists"),
    (torch.full_like(GOOD, N_KEYS), ValueError, "positions of the 23 keys, or -1 for none, got 23"),
    (torch.full_like(GOOD, -2), ValueError, "positions of the 23 keys, or -1 for none, got -2"),
    (torch.full_like(GOOD, 2**62), ValueError, f"or -1 for none, got {2**62}"),
    (GOOD.to("meta"), ValueError, "indices must be on a device that holds numbers, got meta"),
    (GOOD.to_sparse(), ValueError, "indices must be a dense tensor, got torch.sparse_coo"),
]


def test_lists_for_no_queries_are_refused():
    query, key, value = inputs()
    with pytest.raises(ValueError, match=r"a list for each of the 0 queries, .* got 11 lists"):
        prescore.attend_keys(query[:, :, :0], key, value, GOOD)


@pytest.mark.parametrize(("indices", "error", "message"), WRONG, ids=str)
def test_wrong_lists_are_refused(indices, error, message):
    with pytest.raises(error, match=message):
        prescore.attend_keys(*inputs(), indices)


def test_backends_that_read_no_lists_are_refused():
    with pytest.raises(Unsupported, match=r"backend 'triton' cannot run: it runs Routed only"):
        prescore.attend_keys(*inputs(), GOOD, backend="triton")
    with pytest.raises(ValueError, match="key must be finite where it is not padding, got nan"):
        prescore.attend_keys(*(tensor * torch.nan for tensor in inputs()), GOOD)
