"""Tiny random models of many families, with attention sharp enough that a wrong key shows."""

import torch

from prescore import Hyper, KMeans, Lsh, Routed, Selected
from prescore.integrations.torchvision import mend_torchvision

mend_torchvision()

import transformers  # noqa: E402

VOCABULARY = 61
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SIZES |= {"initializer_range": 0.3, "attention_dropout": 0.0}
OLD_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48}
FAMILIES = {
    **{family: {} for family in ("Llama", "Qwen2", "Qwen3", "Gemma", "Glm", "Glm4", "Phi3")},
    "Mistral": {"sliding_window": 9},
    "Gemma3": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "GPT2": {**OLD_SIZES, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "GPTNeoX": {"num_key_value_heads": 4},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3": "Gemma3ForCausalLM"}
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}
# small enough to leave keys out of the prompts below
COARSE = Selected(KMeans(n_clusters=3), top_k=8, min_seq_len=8, sinks=2)
ROUTED = Routed(min_weight=1 / 16, cluster_size=4, chunk_size=8, sinks=2, exact_until=8)
EVERY_KEY = Selected(top_k=1.0, remainder="none", min_seq_len=4)
# for prompts of a few tokens
SMALL = {
    "selected": Selected("key-norm", top_k=3, sinks=1, min_seq_len=4),
    "routed": Routed(min_weight=1 / 4, cluster_size=2, chunk_size=2, sinks=1, exact_until=0),
    "hyper": Hyper(Lsh(2, 2), min_seq_len=4),
}
ROUNDING = 1e-4
"""Between two exact kernels, over two float32 layers."""


def tiny(family, **overrides):
    """A model in evaluation mode, the same weights every time."""
    settings = {**SIZES, **FAMILIES.get(family, {}), **overrides}

    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))(config).eval()
    model.generation_config.eos_token_id = None
    return model


def prompts(batch=2, length=24, side="left", cut=7, seed=1):
    """Token ids and a mask; the first sequence is padded on one side."""
    ids = torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if cut:
        mask[0, slice(None, cut) if side == "left" else slice(-cut, None)] = 0
    return ids * mask, mask


def forward(model, ids, mask=None, **options):
    """Logits without gradients."""
    with torch.no_grad():
        return model(ids, attention_mask=mask, **options).logits


def steps(model, cache, tokens, mask=None):
    """Logits of tokens fed one by one to a model with a cache; `mask` is that of the tokens before."""
    logits = []
    for token in tokens.split(1, dim=1):
        mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)
        logits.append(forward(model, token, mask, past_key_values=cache)[:, -1])
    return torch.stack(logits, dim=1)


def leftovers(model):
    """What a replacement has left on the modules of a model: attributes of ours, methods and hooks."""
    modules = list(model.modules())
    names = [name for m in modules for name in vars(m) if name.startswith("_prescore") or name == "forward"]
    return names + [hook for m in modules for hook in (*m._forward_pre_hooks, *m._forward_hooks)]
