"""Outputs of everything before and after a change of the code: what must keep its bits, and what its rounding.

    python tools/freeze.py write FILE     # with the old code
    python tools/freeze.py compare FILE   # with the new code; exit code 1 where something differs

Only public names are used, so that the script runs on both. Every configuration runs on every kind of mask, dtype
and backend, forward and backward; then ranks and selections of every scorer, a tiny language model with prompts in
chunks, steps, crops, beams and a saved cache, and a vision model. Calls without padding must agree to the bit;
calls with padding, to rounding (rows are grouped in another order). TRITON_INTERPRET=1 adds the Triton backend.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

import prescore
from prescore import Exact, Hyper, KMeans, Lsh, Routed, Selected

CONFIGS = {
    "default": Routed(),
    "routed": Routed(min_weight=1 / 32, cluster_size=16, chunk_size=64, sinks=5, exact_until=100),
    "routed-all": Routed(min_weight=1e-9, cluster_size=16, chunk_size=32, sinks=0, exact_until=0),
    "selected": Selected(top_k=48, min_seq_len=64),
    "selected-none": Selected(KMeans(n_clusters=4), top_k=0.2, remainder="none", recent=8, min_seq_len=64),
    "selected-score": Selected("key-norm", min_score=6.0, top_k=None, min_seq_len=64),
    "selected-lsh": Selected(top_k=64, inner=Lsh(16, 16), min_seq_len=64, min_fraction=0.1),
    "paper": Selected.paper(top_k=64).replace(min_seq_len=64),
    "early": Selected.early(top_k=64).replace(min_seq_len=64),
    "hyper": Hyper(Lsh(16, 16), min_seq_len=64),
    "hyper-published": Hyper.published().replace(min_seq_len=64),
    "exact": Exact(),
}
LENGTH = 300
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MASKS = ("none", "left", "right", "holes")
ROUNDING = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
Frozen = tuple[str, Tensor, float]
"""Name, numbers, and the largest error beside the largest number; 0 = to the bit."""


def tensors(
    dtype: torch.dtype, *, n_keys: int = LENGTH, dim: int = 32, batch: int = 2, seed: int = 0
) -> list[Tensor]:
    """Queries of four heads, keys and values of two; keys have clusters and one outlier."""
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, 4, n_keys, dim, generator=draw)
    key, value = (torch.randn(batch, 2, n_keys, dim, generator=draw) for _ in range(2))
    key = key + 2 * torch.randn(8, dim, generator=draw)[torch.arange(n_keys) * 8 // n_keys]
    key[:, :, n_keys // 3] *= 3
    return [tensor.to(dtype) for tensor in (query, key, value)]


def padding(name: str) -> Tensor | None:
    """A key padding mask of two sequences."""
    if name == "none":
        return None
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, {"left": slice(37), "right": slice(-37, None), "holes": slice(50, 60)}[name]] = False
    return mask


def calls() -> Iterator[Frozen]:
    """Every configuration, mask, dtype and backend; gradients without padding."""
    backends = ["plain", "native", "auto"] + (["triton"] if os.environ.get("TRITON_INTERPRET") else [])
    for name, config in CONFIGS.items():
        for mask_name in MASKS:
            mask = padding(mask_name)
            for dtype_name, dtype in DTYPES.items():
                for is_causal in (True, False):
                    for backend in backends:
                        n_keys = 2600 if name == "default" and mask is None and backend != "triton" else LENGTH
                        inputs = [tensor.requires_grad_(mask is None) for tensor in tensors(dtype, n_keys=n_keys)]
                        options = {
                            "is_causal": is_causal,
                            "key_padding_mask": mask,
                            "generator": 3,
                            "backend": backend,
                        }
                        case = f"{name}/{mask_name}/{dtype_name}/{'causal' if is_causal else 'full'}/{backend}"
                        with suppress(prescore.errors.Unsupported):
                            output, aux = prescore.prescored_attention(*inputs, config, return_aux=True, **options)
                            tolerance = 0.0 if mask is None else ROUNDING[dtype_name]
                            real = torch.ones(()) if mask is None else mask[:, None, :, None]
                            yield case, (output * real).detach(), tolerance
                            seen = aux.lse.detach()[..., None]
                            yield f"{case}/lse", seen if mask is None else seen.where(real, 0), tolerance
                            yield f"{case}/keys", torch.tensor(aux.stats.keys_per_query), 1e-6
                            if mask is None and dtype_name != "float16":
                                for which, grad in zip(
                                    "qkv", torch.autograd.grad(output.square().sum(), inputs), strict=True
                                ):
                                    yield f"{case}/d{which}", grad, tolerance


def pieces() -> Iterator[Frozen]:
    """Fewer queries than keys, other lengths, merges, ranks and selections."""
    query, key, value = tensors(torch.float32)
    for name, config in CONFIGS.items():
        for n_query in (1, 7, 70):
            output = prescore.prescored_attention(
                query[:, :, -n_query:], key, value, config, is_causal=True, generator=3
            )
            yield f"{name}/last {n_query}", output, 0.0
    halves = [prescore.exact_attention(query, key[:, :, part], value[:, :, part], is_causal=False)
              for part in (slice(150), slice(150, None))]  # fmt: skip
    yield "merge", prescore.merge(*halves).output, 0.0
    yield "hyper_attention", prescore.hyper_attention(query, key, value, CONFIGS["hyper"], generator=1).output, 0.0
    for scorer in sorted(set(prescore.list_scorers())):
        for mask_name in ("none", "left"):
            mask = padding(mask_name)
            tolerance = 0.0 if mask is None else 1e-5
            scores = prescore.score(key, scorer, key_padding_mask=mask, generator=5)
            yield f"score/{scorer}/{mask_name}", scores.nan_to_num(neginf=-1e9), tolerance
        selection = prescore.select(key, scorer, top_k=40, recent=4, generator=5)
        yield f"select/{scorer}", selection.indices, 0.0


def models() -> Iterator[Frozen]:
    """A tiny language model: prompts, chunks, steps, beams, crops, a saved cache, padding; a vision model."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

    from prescore.integrations.transformers.cache import PrescoredCache

    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.3)).eval()
    ids = torch.randint(2, 61, (2, 400), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :50] = 0
    for name, config in CONFIGS.items():
        with torch.no_grad(), prescore.apply(model, config):
            yield f"model/{name}/prompt", model(ids).logits[:, ::7], 0.0
            yield f"model/{name}/padded", model(ids, attention_mask=mask).logits[:, 60::7], 1e-3
            cache = PrescoredCache(model.config)
            stops = (0, 150, 300, 301, 302, 306, 330)
            spans = [slice(*span) for span in pairwise(stops)]
            logits = [model(ids[:, span], past_key_values=cache).logits for span in spans]
            yield f"model/{name}/chunks and steps", torch.cat(logits, 1)[:, ::5], 0.0
            with tempfile.TemporaryDirectory() as folder:
                cache.save(Path(folder) / "cache.safetensors")
                loaded = PrescoredCache.load(Path(folder) / "cache.safetensors")
            yield f"model/{name}/loaded", model(ids[:, 330:331], past_key_values=loaded).logits, 0.0
            cache.crop(-20)
            yield f"model/{name}/cropped", model(ids[:, 310:311], past_key_values=cache).logits, 0.0
            plain = DynamicCache(config=model.config)
            model(ids, attention_mask=mask, past_key_values=plain)
            steps = []
            for n in range(3):
                longer = torch.nn.functional.pad(mask, (0, n + 1), value=1)
                steps.append(model(ids[:, n : n + 1], attention_mask=longer, past_key_values=plain).logits)
            yield f"model/{name}/padded steps", torch.cat(steps, 1), 1e-3
            options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "num_beams": 3}
            yield f"model/{name}/beams", model.generate(ids[:, :200], **options), 0.0
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    vit = ViTModel(ViTConfig(**sizes, image_size=64, patch_size=4, initializer_range=0.3)).eval()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    for name, config in CONFIGS.items():
        with torch.no_grad(), prescore.apply(vit, config):
            yield f"vision/{name}", vit(images).last_hidden_state, 0.0


def frozen() -> Iterator[Frozen]:
    """Everything."""
    yield from calls()
    yield from pieces()
    yield from models()


def compare(path: Path) -> int:
    """Print every difference and count the cases; 1 where there is one."""
    old, new, worst = torch.load(path, weights_only=True), set(), {True: 0.0, False: 0.0}
    wrong = []
    for name, tensor, tolerance in frozen():
        new.add(name)
        if name not in old:
            wrong.append(f"{name}: new")
            continue
        if old[name].shape != tensor.shape:
            wrong.append(f"{name}: shape {tuple(old[name].shape)} is now {tuple(tensor.shape)}")
            continue
        before, after = old[name].double(), tensor.double()
        size = before[before.isfinite()].abs().max() if before.isfinite().any() else torch.ones(())
        same = (
            before == after
            if not before.is_floating_point()
            else (before == after) | (before.isnan() & after.isnan())
        )
        error = (
            float((before - after).where(~same, 0).abs().max() / size.clamp_min(1e-30)) if same.numel() else 0.0
        )
        worst[tolerance == 0] = max(worst[tolerance == 0], error)
        if not error <= tolerance:
            wrong.append(f"{name}: differs by {error:.1e}, allowed {tolerance:.0e}")
    wrong += [f"{name}: gone" for name in old if name not in new]
    print("\n".join(wrong))
    print(
        f"{len(new)} cases, {len(wrong)} differ; largest error of calls without padding {worst[True]:.1e}, "
        f"with padding {worst[False]:.1e}"
    )
    return int(bool(wrong))


def main(words: list[str]) -> int:
    """Run one of the two commands."""
    warnings.simplefilter("ignore")
    if len(words) != 2 or words[0] not in ("write", "compare"):
        print("usage: freeze.py write|compare FILE", file=sys.stderr)
        return 2
    path = Path(words[1])
    if words[0] == "compare":
        return compare(path)
    torch.save({name: tensor.clone() for name, tensor, _ in frozen()}, path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
