"""The public functions under torch.compile and torch.jit.trace, outside of a model."""

import pytest
import torch

import prescore
from prescore import Exact, Hyper, Lsh, Routed, Selected
from prescore.errors import Unsupported

CONFIGS = {
    "routed": Routed(min_weight=1 / 16, cluster_size=8, chunk_size=16, exact_until=16),
    "short": Routed(),
    "selected": Selected(top_k=8, min_seq_len=16),
    "hyper": Hyper(Lsh(8, 8), min_seq_len=16),
    "exact": Exact(),
}


def qkv():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, 96, 8, generator=draw).requires_grad_() for heads in (2, 1, 1)]


FUNCTIONS = {
    **{
        name: lambda q, k, v, config=config: prescore.prescored_attention(
            q * 2, k, v, config, is_causal=True, generator=3
        )
        for name, config in CONFIGS.items()
    },
    "aux": lambda q, k, v: prescore.prescored_attention(q * 2, k, v, is_causal=True, return_aux=True)[1].lse,
    "exact_attention": lambda q, k, v: prescore.exact_attention(q * 2, k, v).output,
    "hyper_attention": lambda q, k, v: prescore.hyper_attention(q * 2, k, v, generator=3).output,
    "score": lambda q, k, v: q.sum() + prescore.score(k.detach() * 2, "key-diff"),
    "select": lambda q, k, v: q + prescore.select(k * 2, "key-diff", top_k=5).indices.sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compile_breaks_its_graph_at_a_public_function(name):
    torch._dynamo.reset()
    results = []
    for function in (FUNCTIONS[name], torch.compile(FUNCTIONS[name], backend="eager")):
        inputs = qkv()
        output = function(*inputs) + 1
        output.sum().backward()
        results.append([output.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)])
    eager, compiled = results
    assert len(eager) == len(compiled) > 1
    assert all(torch.equal(*pair) for pair in zip(eager, compiled, strict=True))


def test_a_full_graph_is_refused_with_the_reason():
    torch._dynamo.reset()
    compiled = torch.compile(FUNCTIONS["routed"], backend="eager", fullgraph=True)
    with pytest.raises(
        Exception, match=r"prescore\.prescored_attention: which keys are read depends on their numbers"
    ):
        compiled(*qkv())


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"exact"}))
def test_a_trace_would_record_the_keys_of_one_input(name):
    with pytest.raises(Unsupported, match=r"torch.jit.trace would record the choice of keys of one input"):
        torch.jit.trace(FUNCTIONS[name], tuple(qkv()), check_trace=False)


@pytest.mark.filterwarnings("ignore")
def test_exact_attention_can_be_traced():
    traced = torch.jit.trace(FUNCTIONS["exact"], tuple(qkv()), check_trace=False)
    query, key, value = (tensor.flip(2) for tensor in qkv())
    torch.testing.assert_close(traced(query, key, value), FUNCTIONS["exact"](query, key, value))
