"""A tiny random ViT of 17 tokens and five classes in a folder, ten images, and a study of both."""

import pytest
import torch

from prescore.bench.vision.accuracy import Study
from prescore.bench.vision.models import load_vision_model, open_folder
from prescore.integrations.torchvision import mend_torchvision


@pytest.fixture
def model_folder(tmp_path):
    mend_torchvision()
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    model = ViTForImageClassification(ViTConfig(**shape, image_size=32, patch_size=8, num_labels=5))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def image_folder(tmp_path):
    from PIL import Image

    draw = torch.Generator().manual_seed(1)
    for label in range(5):
        (tmp_path / "images" / f"class{label}").mkdir(parents=True)
        for number in range(2):
            noise = torch.randint(0, 256, (36, 44, 3), generator=draw, dtype=torch.uint8)
            image = Image.frombytes("RGB", (44, 36), bytes(noise.flatten().tolist()))
            image.save(tmp_path / "images" / f"class{label}" / f"{number}.png")
    return tmp_path / "images"


@pytest.fixture
def study(model_folder, image_folder):
    return Study(load_vision_model(model_folder), open_folder(image_folder), {"model": "tiny"}, batch_size=4)
