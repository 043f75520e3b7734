"""Named checks that the ordinary tests and the mutation table both call; each raises AssertionError."""

import itertools
import math

import torch
from oracles.budgets import assert_within
from oracles.dense import dense_attention, full_weights, subset_weights
from oracles.inputs import attention_tensors
from oracles.naive import naive_weights

import prescore
from prescore import Exact, Hyper, KMeans, Lsh, Routed, Selected
from prescore.attention import Options
from prescore.attention import attend as run_call
from prescore.scoring import hashing

LSH = Lsh(block_size=4, sample_size=5, n_projections=3, alignment="rank")
CONFIGS = {
    "paper": Selected.paper(top_k=9, min_seq_len=8, inner=LSH),
    "hyper": Hyper(LSH, min_seq_len=8),
    "hyper full": Hyper(LSH.replace(alignment="hash"), min_seq_len=0),
    "early": Selected.early(top_k=9, min_seq_len=8, inner=LSH),
    "selected": Selected(top_k=9, min_seq_len=8),
    "default": Routed(),
    "routed": Routed(min_weight=1 / 8, cluster_size=2, chunk_size=4, sinks=2, exact_until=0),
    "exact": Exact(),
    "centroids": Selected.paper("kmeans", 9, remainder="centroids", min_seq_len=0, inner=LSH),
    "sampled": Selected(KMeans(noise=0.1), 9, selector="sample", min_seq_len=8),
}
"""Configurations of every kind, for calls of some 40 keys."""
FLOAT64 = 1e-10
"""A few hundred float64 roundings of numbers of size 1 to 100: far above rounding, far below any wrong weight."""


def aligned_by_rank(config):
    """Whether queries are sent to blocks by their rank among all queries, which leaks and leaves padding open."""
    lsh = config.lsh if isinstance(config, Hyper) else getattr(config, "inner", None)
    return isinstance(lsh, Lsh) and lsh.alignment == "rank"


def attend(tensors, config, mask=None, **options):
    """`prescored_attention` as output and lse, and what it reports."""
    options |= {"key_padding_mask": mask, "return_aux": True}
    output, aux = prescore.prescored_attention(*tensors, config=config, **options)
    return prescore.Attended(output, aux.lse), aux


def hidden(tensor, mask, fill):
    """Padded keys or values hold `fill`."""
    return tensor if mask is None else tensor.masked_fill(~mask[:, None, :, None], fill)


def assert_equal(result, truth, what=""):
    """Output and lse agree, up to the order of float64 sums."""
    assert_within(result.output, truth.output, FLOAT64, f"output{what}")
    assert_within(result.lse, truth.lse, FLOAT64, f"lse{what}")


def loss_of(attended, counted):
    """A number that feels output and lse of each counted query that sees something, each in its own way."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(attended.output.shape, generator=generator, dtype=torch.float64)
    counted = counted & ~torch.isneginf(attended.lse.detach())
    output, lse = attended.output.double() * weight, attended.lse.double() * weight[..., 0]
    return output[counted].sum() + lse[counted].sum()


def check_oracle(config, tensors, *, is_causal=False, mask=None, seed=0, selection=None, gradients=False):
    """The library equals the definition written out in loops, NaN in the padding and all.

    With `gradients` those of output and lse too; unused keys have exactly none. Returns how many those are.
    """
    query, key, value = (t.clone().requires_grad_(gradients) for t in tensors)
    options = {"is_causal": is_causal, "generator": seed, "selection": selection}
    weights = naive_weights(query, key, config, key_padding_mask=mask, **options)
    scale = query.shape[-1] ** -0.5
    truth = dense_attention(query, hidden(key, mask, 0.0), hidden(value, mask, 0.0), weights, scale=scale)
    poisoned = query, hidden(key, mask, math.nan), hidden(value, mask, math.nan)
    result, _ = attend(poisoned, config, mask, **options)
    real = torch.ones(truth.lse.shape, dtype=torch.bool)
    if mask is not None and aligned_by_rank(config) and query.shape[2] == key.shape[2]:
        real &= mask[:, None]  # the published alignment leaves padding queries open
    assert_equal(*(prescore.Attended(found.output[real], found.lse[real]) for found in (result, truth)))
    if not gradients:
        return None
    grads = [torch.autograd.grad(loss_of(each, real), (query, key, value)) for each in (result, truth)]
    for name, got, wanted in zip(("query", "key", "value"), *grads, strict=True):
        assert_within(got, wanted, FLOAT64, f"gradient of {name}")
    used = (~torch.isneginf(weights.keys)).any(2) | (weights.means > 0).any(2)
    used = used.unflatten(1, (key.shape[1], -1)).any(2)
    assert not any(got[~used].any() for got in grads[0][1:]), "gradients of unused keys must be exactly 0"
    return int((~used).sum())


def check_unbiased(config, *, seeds, selected):
    """Mean over seeds of exp(lse) and of the unnormalised output = the sums over the (selected) keys."""
    query, key, value = attention_tensors(heads=2, n_query=4, n_keys=20, dim=3, value_dim=2, seed=5, spread=0.8)
    selection, member = None, torch.ones(1, 1, 20, dtype=torch.bool)
    if selected:
        member = torch.arange(20).remainder(5).lt(3)[None, None]
        indices = member.nonzero()[:, 2][None, None]
        selection = prescore.Selection(indices, torch.ones_like(indices, dtype=torch.bool))
    truth = dense_attention(query, key, value, subset_weights(full_weights(query, key), member), scale=3**-0.5)
    if not selected:
        config = Hyper(config.inner, min_seq_len=config.min_seq_len)
    samples = []
    for seed in range(seeds):  # without the stats of `return_aux`, which take longer than the call
        options = Options(generator=seed, selection=selection)
        output, lse = run_call(query, key, value, config, options, need_lse=True).attended
        mass = lse.exp()[..., None]
        samples.append(torch.cat((mass, mass * output), dim=-1))
    drawn, mass = torch.stack(samples), truth.lse.exp()[..., None]
    expected = torch.cat((mass, mass * truth.output), dim=-1)
    error = drawn.std(0) / seeds**0.5
    assert float(error.max()) > 0, "the estimator must vary with the seed, or the test shows nothing"
    distance = ((drawn.mean(0) - expected).abs() / error.clamp_min(1e-12)).max()
    assert float(distance) <= 4.0, f"mean over {seeds} seeds is {float(distance):.1f} standard errors away"


def check_gray_neighbours(n_bits):
    """Patterns in the order of their rank are a permutation whose neighbours differ in one bit."""
    codes = torch.arange(2**n_bits)
    ranks = hashing.gray_rank(codes, n_bits)
    assert torch.equal(ranks.sort().values, codes), "ranks must be a permutation"
    in_order = ranks.argsort().tolist()
    for left, right in itertools.pairwise(in_order):
        assert (left ^ right).bit_count() == 1, f"patterns {left:b} and {right:b} are neighbours"


def check_merge_of_split(seed=0):
    """Merging attention over three parts of the keys = attention over all, forward and backward."""
    inputs = query, key, value = [t.requires_grad_() for t in attention_tensors(n_query=5, n_keys=17, seed=seed)]
    keys = [slice(0, 4), slice(4, 11), slice(11, 17)]
    parts = [prescore.exact_attention(query, key[:, :, p], value[:, :, p]) for p in keys]

    def gradients(result):
        loss = result.output.square().sum() + result.lse.sin().sum()
        return torch.autograd.grad(loss, inputs, retain_graph=True)

    truth = dense_attention(query, key, value, full_weights(query, key), scale=0.5)
    merged = prescore.merge(*parts)
    nested = prescore.merge(prescore.merge(parts[2], parts[0]), parts[1])
    for name, result in (("merged", merged), ("nested and reordered", nested)):
        assert_equal(result, truth, f", {name}")
        for got, wanted in zip(gradients(result), gradients(truth), strict=True):
            assert_within(got, wanted, FLOAT64, f"gradient of {name}")


def check_centroids_of_equal_keys():
    """Where the keys behind a centroid are equal it is exact: nothing is lost by leaving them out."""
    query, key, value = attention_tensors(heads=2, kv_heads=1, n_query=5, n_keys=3, seed=3)
    key, value = key.repeat_interleave(7, dim=2), value.repeat_interleave(7, dim=2)
    config = Selected(KMeans(n_clusters=3), 4, sinks=0, inner=Exact(), remainder="centroids")
    output = prescore.prescored_attention(query, key, value, config=config)
    assert_within(output, prescore.exact_attention(query, key, value).output, FLOAT64, "centroids of equal keys")
