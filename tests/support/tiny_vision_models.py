"""Tiny random vision transformers of both libraries, and the map from timm's weights to Hugging Face's."""

import re

import torch

from prescore.integrations.torchvision import import_timm, mend_torchvision

SHAPE = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
SHAPE |= {"image_size": 64, "patch_size": 8}
RENAMED = {
    r"^cls_token": "vit.embeddings.cls_token",
    r"^pos_embed": "vit.embeddings.position_embeddings",
    r"^patch_embed\.proj": "vit.embeddings.patch_embeddings.projection",
    r"^norm": "vit.layernorm",
    r"^head": "classifier",
    r"^blocks": "vit.layers",
    r"norm1": "layernorm_before",
    r"norm2": "layernorm_after",
    r"attn\.proj": "attention.o_proj",
}
"""Names of weights, timm's to Hugging Face's."""


def pixels(batch=2, size=64, seed=0):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def spread(model, seed=0):
    """Weights large enough that attention is far from uniform, drawn without the global generator."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
    return model.eval()


def tiny_timm(name="vit_tiny_patch16_224", **options):
    shape = {"img_size": 64, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
    return spread(import_timm().create_model(name, **{**shape, **options}))


def tiny_huggingface(kind="ViTForImageClassification", config="ViTConfig", **options):
    mend_torchvision()
    import transformers

    settings = getattr(transformers, config)(**{**SHAPE, "num_labels": 5, **options})
    return spread(getattr(transformers, kind)(settings))


def huggingface_from_timm(weights, n_heads, size, patch):
    """A `ViTForImageClassification` with the weights of a timm ViT."""
    sizes = {"hidden_size": weights["pos_embed"].shape[-1], "num_labels": weights["head.weight"].shape[0]}
    sizes["num_hidden_layers"] = 1 + max(int(number) for number in re.findall(r"blocks\.(\d+)", " ".join(weights)))
    sizes["intermediate_size"] = weights["blocks.0.mlp.fc1.weight"].shape[0]
    sizes |= {"num_attention_heads": n_heads, "image_size": size, "patch_size": patch}
    mapped = {}
    for timm_name, weight in weights.items():
        name = timm_name
        for old, new in RENAMED.items():
            name = re.sub(old, new, name)
        if "attn.qkv" in name:
            for part, third in zip("qkv", weight.chunk(3), strict=True):
                mapped[name.replace("attn.qkv", f"attention.{part}_proj")] = third
        else:
            mapped[name] = weight
    model = tiny_huggingface(layer_norm_eps=1e-6, **sizes)
    model.load_state_dict(mapped)
    return model
