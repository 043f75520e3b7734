"""A tiny random vision transformer and images for it, as folders."""

import torch


def save_tiny_vit(folder):
    """A model of 17 tokens in Hugging Face format; the folder."""
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    model = ViTForImageClassification(ViTConfig(**shape, image_size=32, patch_size=8, num_labels=5))
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2, generator=draw)
    model.save_pretrained(folder)
    return folder


def save_tiny_images(folder):
    """Ten images in five classes; the folder."""
    from PIL import Image

    draw = torch.Generator().manual_seed(1)
    for number in range(10):
        path = folder / f"class{number // 2}" / f"{number % 2}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = torch.randint(0, 256, (36, 44, 3), generator=draw, dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(path)
    return folder
