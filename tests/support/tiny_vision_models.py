"""Tiny random vision transformers of both libraries, and the map from timm's weights to Hugging Face's."""

import re

import torch

from prescore.integrations.torchvision import import_timm, mend_torchvision

SHAPE = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
SHAPE |= {"image_size": 64, "patch_size": 8}


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


def huggingface_from_timm(weights):
    """A `ViTForImageClassification` with the weights of a `tiny_timm`."""
    names = {
        "^cls_token": "vit.embeddings.cls_token",
        "^pos_embed": "vit.embeddings.position_embeddings",
        "^patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
        "^norm": "vit.layernorm",
        "^head": "classifier",
        "^blocks": "vit.layers",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "attn.proj": "attention.o_proj",
        "attn.qkv": "attention.*_proj",
    }
    mapped = {}
    for timm_name, weight in weights.items():
        name = timm_name
        for old, new in names.items():
            name = re.sub(old, new, name)
        parts = "qkv" if "*" in name else "."
        mapped |= {
            name.replace("*", part): rows for part, rows in zip(parts, weight.chunk(len(parts)), strict=True)
        }
    model = tiny_huggingface(intermediate_size=192, layer_norm_eps=1e-6)
    model.load_state_dict(mapped)
    return model
