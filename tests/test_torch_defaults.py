"""torch's default dtype and default device change no result."""

from functools import cache

import pytest
import torch

import prescore
from prescore import Coupling, Exact, Hyper, KMeans, Lsh, Routed, Selected

LSH = Lsh(block_size=16, sample_size=16)
RANK = LSH.replace(alignment="rank")
CONFIGS = {
    "routed": Routed(chunk_size=32, exact_until=64, cluster_size=16),
    "selected": Selected("kmeans", 32, min_seq_len=64),
    "without centroids": Selected("key-diff", 0.3, min_seq_len=64, remainder="none", recent=3, selector="sample"),
    "paper": Selected.paper("kmeans", 32, min_seq_len=64, inner=RANK, sinks=2, coupling=Coupling(blocks="all")),
    "early": Selected.early("key-norm", 32, min_seq_len=64, inner=LSH),
    "hyper": Hyper(LSH, min_seq_len=64, sinks=4),
    "published": Hyper.published(lsh=RANK, min_seq_len=64),
    "exact": Exact(),
}


def tensors(n_query=300, dtype=torch.float32):
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = ((4, n_query), (2, 300), (2, 300))
    options = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    return [torch.randn(2, heads, length, 32, **options).to(dtype) for heads, length in sizes]


def calls():
    """Names of calls, and functions that return tensors."""
    mask = torch.arange(300, device="cpu") >= torch.tensor([[17], [0]], device="cpu")
    causal, padded = {"is_causal": True}, {"key_padding_mask": mask}
    dropped = {"dropout_p": 0.3, "dropout_generator": 3, "is_causal": True}
    for name, config in CONFIGS.items():

        def attend(inputs, config=config, **options):
            output, aux = prescore.prescored_attention(*inputs, config, return_aux=True, **options)
            return output, aux.lse

        def learn(inputs, config=config, **options):
            leaves = [t.requires_grad_() for t in inputs]
            return torch.autograd.grad(prescore.prescored_attention(*leaves, config, **options).sum(), leaves)

        for options in ({}, causal, padded, causal | padded, dropped, causal | {"backend": "plain"}):
            yield f"{name} {options.keys()}", lambda attend=attend, options=options: attend(tensors(), **options)
        for n_query in (1, 9):
            yield f"{name} {n_query}", lambda attend=attend, n=n_query: attend(tensors(n), **causal)
        yield f"{name} bfloat16", lambda attend=attend: attend(tensors(dtype=torch.bfloat16), **causal)
        for options in (causal, dropped):
            yield f"{name} learn {len(options)}", lambda learn=learn, o=options: learn(tensors(), **o)
    key = tensors()[1]
    rules = [KMeans(rule=rule, noise=0.1) for rule in ("farthest", "cluster-share", "sensitivity", "balanced")]
    for scorer in (*prescore.list_scorers(), *rules):
        yield f"score {scorer}", lambda s=scorer: [prescore.score(key, s, key_padding_mask=mask, generator=1)]
        yield f"select {scorer}", lambda s=scorer: [prescore.select(key, s, top_k=20, sinks=2, recent=1).indices]
    yield "merge", lambda: prescore.merge(*(prescore.exact_attention(*tensors()) for _ in range(2)))


@cache
def expected():
    return {name: list(call()) for name, call in calls()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float32])
def test_results_do_not_depend_on_a_default(dtype):
    wanted, wrong = expected(), []
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta" if dtype == torch.float32 else "cpu"):
            for name, call in calls():
                for left, right in zip(call(), wanted[name], strict=True):
                    same = left.dtype == right.dtype and torch.equal(left, right)
                    wrong += [] if same else [name]
    finally:
        torch.set_default_dtype(torch.float32)
    assert wrong == []
