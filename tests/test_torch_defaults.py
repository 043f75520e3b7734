"""torch's default dtype and default device change no result."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

CORE = Path(__file__).parent.parent / "src" / "prescore"
"""Until every area has landed; delete both then."""

PROGRAM = """
import torch, prescore
from prescore import Coupling, Exact, Hyper, KMeans, Lsh, Routed, Selected

LSH = Lsh(block_size=16, sample_size=16)
SMALL = Routed(chunk_size=32, exact_until=64, cluster_size=16)
CONFIGS = {
    "routed": SMALL,
    "tolerance": SMALL.replace(tolerance=0.3),
    "selected": Selected("kmeans", 32, min_seq_len=64),
    "without centroids": Selected("key-diff", 0.3, min_seq_len=64, remainder="none", recent=3, selector="sample"),
    "paper": Selected.paper("kmeans", 32, min_seq_len=64, inner=LSH.replace(alignment="rank")),
    "early": Selected.early("key-norm", 32, min_seq_len=64, inner=LSH),
    "hyper": Hyper(LSH, min_seq_len=64, sinks=4),
    "exact": Exact(),
}

def tensors(n_query=300, dtype=torch.float32):
    generator = torch.Generator("cpu").manual_seed(0)
    def normal(heads, length):
        size = (2, heads, length, 32)
        return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    return normal(4, n_query), normal(2, 300), normal(2, 300)

def calls():
    mask = torch.arange(300, device="cpu") >= torch.tensor([[17], [0]], device="cpu")
    for name, config in CONFIGS.items():
        causal, padded = {"is_causal": True}, {"key_padding_mask": mask}
        for options in ({}, causal, padded, causal | padded):
            yield f"{name} {sorted(options)}", lambda: prescore.prescored_attention(*tensors(), config, **options)
        def explained():
            output, aux = prescore.prescored_attention(*tensors(), config, is_causal=True, return_aux=True)
            return torch.cat((output, aux.lse[..., None]), -1)
        yield f"{name} aux", explained
        yield f"{name} step", lambda: prescore.prescored_attention(*tensors(1), config, is_causal=True)
        yield f"{name} last", lambda: prescore.prescored_attention(*tensors(9), config, is_causal=True)
        plain = {"is_causal": True, "backend": "plain"}
        yield f"{name} plain", lambda: prescore.prescored_attention(*tensors(), config, **plain)
        half = lambda: prescore.prescored_attention(*tensors(dtype=torch.bfloat16), config, is_causal=True)
        yield f"{name} bfloat16", half
        if name == "tolerance":
            continue
        def gradients():
            leaves = [t.requires_grad_() for t in tensors()]
            prescore.prescored_attention(*leaves, config, is_causal=True).square().sum().backward()
            return torch.cat([leaf.grad.flatten() for leaf in leaves])
        yield f"{name} gradients", gradients
        dropped = {"dropout_p": 0.3, "dropout_generator": 3, "is_causal": True}
        yield f"{name} dropout", lambda: prescore.prescored_attention(*tensors(), config, **dropped)
    key = tensors()[1]
    for scorer in prescore.list_scorers():
        yield f"score {scorer}", lambda: prescore.score(key, scorer, key_padding_mask=mask, generator=1)
        yield f"select {scorer}", lambda: prescore.select(key, scorer, top_k=20, sinks=2, recent=1).indices
    for rule in ("farthest", "cluster-share", "sensitivity", "balanced"):
        yield f"score {rule}", lambda: prescore.score(key, KMeans(rule=rule, noise=0.1))
    parts = [prescore.exact_attention(*tensors()) for _ in range(2)]
    yield "merge", lambda: prescore.merge(*parts).output

def compare(default):
    for name, call in calls():
        try:
            found = call()
            assert found.dtype == expected[name].dtype, found.dtype
            assert torch.equal(found, expected[name]), "other numbers"
        except Exception as error:
            print(f"{default}: {name}: {type(error).__name__}: {str(error).splitlines()[:1]}")

expected = {name: call() for name, call in calls()}
for default in ("bfloat16", "float16", "float64"):
    torch.set_default_dtype(getattr(torch, default))
    compare(default)
torch.set_default_dtype(torch.float32)
with torch.device("meta"):
    compare("meta")
print(len(expected), "calls")
"""


@pytest.fixture(scope="module", name="differences")
def run_program():
    """Calls that give something else, or fail, under each default: in a process of their own."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, count = done.stdout.splitlines()
    assert int(count.split()[0]) > 100
    return lines


@pytest.mark.parametrize("default", ["bfloat16", "float16", "float64", "meta"])
def test_results_do_not_depend_on_a_default(default, differences):
    assert [line for line in differences if line.startswith(default)] == []


FACTORIES = {
    *("empty", "zeros", "ones", "full", "arange", "tensor", "eye", "linspace", "logspace"),
    *("rand", "randn", "randint", "randperm"),
}


def made_by_default(text):
    """Lines that call a factory of torch without a dtype or without a device."""
    wrong = []
    for node in ast.walk(ast.parse(text)):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES
        ):
            continue
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
            given = {keyword.arg for keyword in node.keywords}
            wrong += [] if None in given or {"dtype", "device"} <= given else [node.lineno]
    return wrong


def test_the_reader_sees_what_it_must():
    assert made_by_default("torch.zeros(2)\ntorch.arange(3, device=d)\ntorch.rand(2, dtype=t)") == [1, 2, 3]
    assert (
        made_by_default("torch.zeros(2, dtype=t, device=d)\nx.new_zeros(2)\ntorch.zeros_like(x)\nnp.zeros(3)")
        == []
    )


def test_every_tensor_is_made_with_its_dtype_and_device():
    files = [path for path in sorted(CORE.rglob("*.py")) if "bench" not in path.relative_to(CORE).parts]
    wrong = [f"{path.relative_to(CORE)}:{line}" for path in files for line in made_by_default(path.read_text())]
    assert wrong == []
