"""Any image classifier by name: a timm architecture, a Hugging Face folder, or a bare checkpoint file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prescore import checks
from prescore.evaluation.vision.data import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from prescore.integrations.apply import find_adapter, replace_attention
from prescore.integrations.attend import Situation, attend_exactly
from prescore.integrations.timm_import import import_timm, mend_torchvision
from prescore.values import Values

_CHECKPOINT = ".safetensors"
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_HEAD_DIM = 64


@dataclass(frozen=True, eq=False)
class VisionModel:
    """A classifier and what it expects.

    Attributes:
        model: The module, in evaluation mode.
        name: What the user called it.
        preprocessing: Of its images.
        n_tokens: Keys of an attention layer, prefix tokens included.
        n_prefix: Tokens before the patches.
        n_layers: Attention layers.
        arguments: Passed to every call beside the pixels.
    """

    model: nn.Module
    name: str
    preprocessing: Preprocessing
    n_tokens: int
    n_prefix: int
    n_layers: int
    arguments: Mapping[str, Any]

    def logits(self, pixels: Tensor) -> Tensor:
        """Class scores `[B, classes]`."""
        result = self.model(pixels, **self.arguments)
        return result if isinstance(result, Tensor) else result.logits


def load_vision_model(
    name: str | Path, *, arch: str | None = None, resolution: int | None = None, device: str = "cpu"
) -> VisionModel:
    """Load a classifier.

    Args:
        name: A folder with a Hugging Face model, a checkpoint with timm's key names (.safetensors),
            or the name of a timm architecture, whose weights timm then fetches.
        arch: timm architecture of a checkpoint; None = a plain ViT read off the shapes of the weights.
        resolution: Side of the images in pixels; position embeddings are resized. None = the model's own.
        device: Where it runs.
    """
    checks.device("device", device)
    path = Path(name)
    if path.is_dir():
        if arch is not None:
            raise ValueError(f"arch must not be given with a Hugging Face folder, got {arch!r}")
        model, preprocessing, arguments = _from_folder(path, resolution)
    elif path.suffix in _PICKLED:
        raise ValueError(f"model must be a {_CHECKPOINT} file, for a pickled one can run code, got {name}")
    elif path.suffix == _CHECKPOINT:
        if not path.is_file():
            raise ValueError(f"model must be a file that exists, got {name}")
        model, preprocessing, arguments = _from_checkpoint(path, arch, resolution)
    else:
        model, preprocessing, arguments = _from_timm(str(name), resolution)
    model = model.eval().to(device)
    return _measured(model, str(name), preprocessing, arguments, device)


def _from_folder(path: Path, resolution: int | None) -> tuple[nn.Module, Preprocessing, Values]:
    mend_torchvision()
    from transformers import AutoModelForImageClassification

    try:
        model = AutoModelForImageClassification.from_pretrained(path, local_files_only=True, use_safetensors=True)
    except Exception as error:
        # transformers and safetensors raise what they like, some of it pages long
        raise OSError(
            f"model must be an image classifier of transformers, got {path} ({_first(error)})"
        ) from error
    vision = getattr(model.config, "vision_config", model.config)
    size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    described: Values = {}
    if (path / "preprocessor_config.json").is_file():
        described = json.loads((path / "preprocessor_config.json").read_text())
    preprocessing = Preprocessing(
        size=resolution or size,
        crop=_crop(described),
        mean=tuple(described.get("image_mean") or IMAGENET_MEAN),
        std=tuple(described.get("image_std") or IMAGENET_STD),
    )
    resized = resolution is not None and resolution != size
    return model, preprocessing, {"interpolate_pos_encoding": True} if resized else {}


def _crop(described: Mapping[str, Any]) -> float:
    """The centre's share of the shorter side, as `preprocessor_config.json` gives it."""
    resized, cropped = described.get("size"), described.get("crop_size")
    if not isinstance(resized, dict):
        return Preprocessing.crop
    short = resized.get("shortest_edge") or min(resized.get("height", 0), resized.get("width", 0))
    inner = min(cropped.values()) if isinstance(cropped, dict) and described.get("do_center_crop") else short
    return min(1.0, inner / short) if short else Preprocessing.crop


def _from_timm(name: str, resolution: int | None) -> tuple[nn.Module, Preprocessing, Values]:
    timm = import_timm()
    if not timm.is_model(name):
        raise ValueError(
            f"model must be a folder, a checkpoint ({_CHECKPOINT}) or an architecture of timm, got {name!r}"
        )
    options = {} if resolution is None else {"img_size": resolution}
    try:
        model = timm.create_model(name, pretrained=True, **options)
    except Exception as error:
        # hub libraries raise what they like when there is no network
        raise OSError(f"timm could not fetch the weights of {name!r}: {error}") from error
    return model, _timm_preprocessing(model, resolution), {}


def _from_checkpoint(
    path: Path, arch: str | None, resolution: int | None
) -> tuple[nn.Module, Preprocessing, Values]:
    timm = import_timm()
    weights = _read(path)
    if arch is not None:
        if not timm.is_model(arch):
            raise ValueError(f"arch must be an architecture of timm, got {arch!r}")
        model = timm.create_model(arch, pretrained=False)
    else:
        from timm.models.vision_transformer import VisionTransformer

        model = VisionTransformer(**vit_shape(weights))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"checkpoint must have the weights of {arch or 'a plain ViT'}, got {path.name} ({said[:200]})"
        ) from error
    if resolution is not None:
        model.set_input_size(img_size=(resolution, resolution))
    return model, _timm_preprocessing(model, resolution), {}


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except Exception as error:
        # a damaged file makes the readers fail in many ways, none of them of one kind
        raise OSError(f"model must be a readable checkpoint, got {path.name} ({_first(error)})") from error


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def vit_shape(weights: Mapping[str, Tensor]) -> Values:
    """Arguments of timm's `VisionTransformer` that fit a checkpoint; heads are taken to be 64 wide.

    What the weights do not tell (activation, epsilon) is timm's default for a ViT.
    """
    needed = ("patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight")
    absent = [name for name in needed if name not in weights]
    if absent:
        raise ValueError(f"checkpoint must have timm's names of a plain ViT (or give arch), got no {absent[0]}")
    projection = weights["patch_embed.proj.weight"]
    dim, channels, patch = projection.shape[0], projection.shape[1], projection.shape[2]
    if dim % _HEAD_DIM:
        raise ValueError(
            f"checkpoint must have a width that is a multiple of {_HEAD_DIM} (or give arch), got {dim}"
        )
    blocks = [re.match(r"blocks\.(\d+)\.", name) for name in weights]
    n_prefix = int("cls_token" in weights)
    registers = weights["reg_token"].shape[1] if "reg_token" in weights else 0
    n_positions = weights["pos_embed"].shape[1]
    side = round((n_positions - n_prefix - registers) ** 0.5)
    embedded = side * side + n_prefix + registers == n_positions
    side = side if embedded else round(n_positions**0.5)
    pooled = "fc_norm.weight" in weights or not n_prefix
    return {
        "img_size": side * patch,
        "patch_size": patch,
        "in_chans": channels,
        "num_classes": weights["head.weight"].shape[0] if "head.weight" in weights else 0,
        "global_pool": "avg" if pooled else "token",
        "embed_dim": dim,
        "depth": 1 + max(int(block[1]) for block in blocks if block),
        "num_heads": dim // _HEAD_DIM,
        "mlp_ratio": weights["blocks.0.mlp.fc1.weight"].shape[0] / dim,
        "qkv_bias": "blocks.0.attn.qkv.bias" in weights,
        "qk_norm": "blocks.0.attn.q_norm.weight" in weights,
        "init_values": 1e-5 if "blocks.0.ls1.gamma" in weights else None,
        "class_token": bool(n_prefix),
        "no_embed_class": not embedded,
        "reg_tokens": registers,
        "pre_norm": "norm_pre.weight" in weights,
        "final_norm": "norm.weight" in weights or "fc_norm.weight" in weights,
        "fc_norm": "fc_norm.weight" in weights,
    }


def _timm_preprocessing(model: Any, resolution: int | None) -> Preprocessing:
    described: Values = getattr(model, "pretrained_cfg", None) or {}
    return Preprocessing(
        size=resolution or int(model.patch_embed.img_size[0]),
        crop=float(described.get("crop_pct") or Preprocessing.crop),
        mean=tuple(described.get("mean") or IMAGENET_MEAN),
        std=tuple(described.get("std") or IMAGENET_STD),
    )


@torch.inference_mode()
def _measured(
    model: nn.Module, name: str, preprocessing: Preprocessing, arguments: Values, device: str
) -> VisionModel:
    """Count tokens by looking at one image's way through the layers."""
    n_layers = len(find_adapter(model).layers(model))
    seen: list[tuple[int, int]] = []

    def look(query: Tensor, key: Tensor, value: Tensor, situation: Situation) -> Tensor:
        seen.append((key.shape[2], situation.n_prefix))
        return attend_exactly(query, key, value, situation)

    undo = replace_attention(model, dict.fromkeys(range(n_layers), look))
    try:
        channels = next(p.shape[1] for p in model.parameters() if p.ndim == 4)
        size = preprocessing.size
        model(torch.zeros(1, channels, size, size, device=device), **arguments)
    finally:
        undo()
    n_tokens, n_prefix = max(seen)
    return VisionModel(model, name, preprocessing, n_tokens, n_prefix, n_layers, arguments)
