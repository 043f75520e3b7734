"""Tiny random vision transformers of both libraries, and the map from timm's weights to Hugging Face's."""

import torch

from prescore.integrations.torchvision import import_timm, mend_torchvision

SHAPE = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "image_size": 64,
    "patch_size": 8,
}


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
    mend_torchvision()
    from transformers import ViTConfig, ViTForImageClassification

    dim = weights["pos_embed"].shape[-1]
    depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=dim,
            num_hidden_layers=depth,
            num_attention_heads=n_heads,
            intermediate_size=weights["blocks.0.mlp.fc1.weight"].shape[0],
            image_size=size,
            patch_size=patch,
            num_labels=weights["head.weight"].shape[0],
            layer_norm_eps=1e-6,
        )
    )
    plain = {
        "cls_token": "vit.embeddings.cls_token",
        "pos_embed": "vit.embeddings.position_embeddings",
        "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
        "norm": "vit.layernorm",
        "head": "classifier",
    }
    inner = {
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "attn.proj": "attention.o_proj",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
    }
    mapped = {}
    for name, weight in weights.items():
        stem, _, last = name.rpartition(".")
        if name in plain:
            mapped[plain[name]] = weight
        elif stem in plain:
            mapped[f"{plain[stem]}.{last}"] = weight
        else:
            _, number, rest = stem.split(".", 2)
            block = f"vit.layers.{number}"
            if rest == "attn.qkv":
                for part, piece in zip(("q_proj", "k_proj", "v_proj"), weight.chunk(3), strict=True):
                    mapped[f"{block}.attention.{part}.{last}"] = piece
            else:
                mapped[f"{block}.{inner[rest]}.{last}"] = weight
    model.load_state_dict(mapped)
    return model.eval()
