"""The speed table on saved heads of a real model: causal forward, with the error beside the time.

What random tensors cannot show is both how many keys real queries look for and how well the rest is guessed, so a
row has the time, the relative squared error of the layer's output against exact attention, the rows read and the
keys searched per query.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from prescore.attention import prescored_attention
from prescore.bench.memory import SYSTEM
from prescore.bench.records import Row
from prescore.bench.speed.timing import (
    EXACT,
    METHODS,
    Inputs,
    Setting,
    check_rows,
    middle_and_end,
    plain_piece,
    seconds,
)
from prescore.call import Call
from prescore.config import Config, Routed
from prescore.errors import Unsupported
from prescore.integrations.apply import Layers, find_adapter, pick_layers, replace_attention
from prescore.integrations.attention import Attend, AttentionContext, attend_exactly
from prescore.integrations.decode import CachedKeys, LayerCache, Request
from prescore.ops.backend import Needs, pick_backend
from prescore.routed import attention as lanes
from prescore.routed.layout import Layout, make_layout
from prescore.routed.local import attend_near
from prescore.routed.native import attend_compiled, attend_near_compiled, can_build, make_tables
from prescore.routed.plain import attend_plain
from prescore.routed.reference import Search
from prescore.routed.sources import Sources, View
from prescore.routed.tree import FIT_SIZE
from prescore.types import Attended, Values


@dataclass(frozen=True)
class HeadsSetting:
    """One file at one length; every field goes into the record.

    Attributes:
        heads: Name of the file.
        digest: What identifies it.
        n: The first positions that are used.
        methods: As in `Setting`.
        dtype: That all run in.
        repeats: Timed rounds.
        top_k: Keys kept by the paper's preset.
        min_seq_len: Its exact causal leaves.
        memory: See `freed_memory.py`.
    """

    heads: str
    digest: str
    n: int
    methods: tuple[str, ...] = METHODS
    dtype: str = "float32"
    repeats: int = 3
    top_k: int = 2048
    min_seq_len: int = 2048
    memory: str = "system"

    def config(self, method: str) -> Config:
        """The configuration that a method name stands for."""
        base = Setting(self.n, causal=True, backward=False, top_k=self.top_k, min_seq_len=self.min_seq_len)
        return base.config(method)


def heads_row(saved: SavedHeads, setting: HeadsSetting, seed: int) -> Row:
    """A row that times every method on a file."""
    config = {"study": "heads", **asdict(setting), "methods": list(setting.methods)}
    cost = 0.5 * setting.n**2 * saved.shapes[0][1] * (setting.repeats + 2)
    return Row(config, seed, partial(measure_heads, saved, setting), cost)


@torch.no_grad()
def measure_heads(saved: SavedHeads, setting: HeadsSetting) -> Values:
    """Times of exact attention and every method, in turn; errors, rows and searched keys of the methods."""
    inputs = saved.inputs(setting.n, getattr(torch, setting.dtype))
    calls = {EXACT: exact_call(inputs, saved.scale)}
    calls |= {name: _call(inputs, setting.config(name), saved.scale) for name in setting.methods}
    exact = calls[EXACT]()
    methods: dict[str, Values] = {EXACT: {}}
    for name in setting.methods:
        output = calls[name]()
        methods[name] = {
            **_checked(f"{name} on {saved.name}", inputs, setting.config(name), output, saved.scale),
            "error": relative_error(output, exact),
            "head_errors": [relative_error(output[:, head], exact[:, head]) for head in range(output.shape[1])],
            **_read(inputs, setting.config(name), saved.scale),
        }
    times = _in_turn(calls, setting.repeats)
    median = {name: statistics.median(spent) for name, spent in times.items()}
    for name, spent in times.items():
        methods[name] |= {
            "seconds": median[name],
            "spread": max(spent) - min(spent),
            "speedup": median[EXACT] / median[name],
        }
    return {"shape": [list(t.shape) for t in inputs], "exact_scaled": False, "methods": methods}


def relative_error(output: Tensor, wanted: Tensor) -> float:
    """`|output - wanted|^2 / |wanted|^2`."""
    wide = wanted.double()
    return float((output.double() - wide).square().sum() / wide.square().sum().clamp_min(1e-300))


def exact_call(inputs: Inputs, scale: float | None) -> Callable[[], Tensor]:
    """Exact attention over grouped heads, causal."""
    return lambda: scaled_dot_product_attention(*inputs, is_causal=True, scale=scale, enable_gqa=True)


def _call(inputs: Inputs, config: Config, scale: float | None) -> Callable[[], Tensor]:
    return lambda: prescored_attention(*inputs, config, is_causal=True, scale=scale)


def _checked(name: str, inputs: Inputs, config: Config, output: Tensor, scale: float | None) -> Values:
    """How many rows differ from the same call in plain torch; an output that is off is refused by name."""
    if not isinstance(config, Routed):
        wanted = prescored_attention(*inputs, config, is_causal=True, scale=scale, backend="plain")
        return {"rows_off": check_rows(name, output, wanted)}
    pieces = middle_and_end(output.shape[2])
    wanted = torch.cat([plain_piece(inputs, config, rows, True, scale) for rows in pieces], dim=2)
    return {"rows_off": check_rows(name, torch.cat([output[:, :, rows] for rows in pieces], dim=2), wanted)}


def _read(inputs: Inputs, config: Config, scale: float | None) -> Values:
    """Rows read and keys searched by a query, on average over all of them."""
    stats = prescored_attention(*inputs, config, is_causal=True, scale=scale, return_aux=True)[1].stats
    searched = 0.0
    if isinstance(config, Routed):
        searched = stats["keys_compared"] * (1 - stats["exact_queries"] / inputs[0].shape[2])
    return {"keys_per_query": float(stats["keys_per_query"]), "searched_per_query": float(searched)}


def _in_turn(calls: dict[str, Callable[[], Tensor]], repeats: int) -> dict[str, list[float]]:
    """Every call once per round; each has run before, so the memory that it needs is there."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return times


def lengths_of(saved: Sequence[SavedHeads], lengths: Sequence[int] | None) -> list[tuple[SavedHeads, int]]:
    """Each file at each of its lengths: those asked for that it has, None = the whole of it."""
    found = []
    for heads in saved:
        own = [heads.length] if lengths is None else [n for n in lengths if n <= heads.length]
        if not own:
            raise ValueError(f"--n must be at most the {heads.length} positions of {heads.name}, got {lengths}")
        found += [(heads, n) for n in own]
    return found


# Attention inputs of real models as files: what random tensors flatter is measured on these.
#
# A file is a safetensors with `query [1, Hq, N, D]` and `key`, `value [1, Hkv, N, D]` as they reach attention,
# after
# rotation, of one causal layer; `scale` in its metadata, where the layer does not use `D ** -0.5`. Any model's are
# saved with one line:
#
#     >>> save_heads(model, ids, "heads", layers=[0, 8, 16])

SUFFIX = ".safetensors"
_NAMES = ("query", "key", "value")
_LARGEST_HEADER = 1 << 24


@dataclass(frozen=True)
class SavedHeads:
    """One file of attention inputs.

    Attributes:
        path: The file.
        digest: The first letters of its SHA-256, by which records know it.
        shapes: Of query, key and value.
        scale: Factor of the logits; None = `D ** -0.5`.
    """

    path: Path
    digest: str
    shapes: tuple[tuple[int, ...], ...]
    scale: float | None = None

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.path.stem

    @property
    def length(self) -> int:
        """Positions that it holds."""
        return self.shapes[0][2]

    def inputs(self, n: int, dtype: torch.dtype) -> Inputs:
        """Query, key and value of the first `n` positions, each in memory of its own."""
        from safetensors.torch import load_file

        if not 1 <= n <= self.length:
            raise ValueError(f"n must be between 1 and the {self.length} positions of {self.name}, got {n}")
        saved: dict[str, Tensor] = load_file(self.path)
        query, key, value = (saved[name][:, :, :n].to(dtype).contiguous() for name in _NAMES)
        return query, key, value


def find_heads(directory: str | Path) -> list[SavedHeads]:
    """All files of a directory, by name; one that is something else is refused."""
    files = sorted(Path(directory).glob(f"*{SUFFIX}"))
    if not files:
        raise FileNotFoundError(f"--heads must be a directory with {SUFFIX} files, got {str(directory)!r}")
    return [read_heads(path) for path in files]


def read_heads(path: Path) -> SavedHeads:
    """What a file holds, without its tensors."""
    header = _header(path)
    shapes = tuple(tuple(header.get(name, {}).get("shape", ())) for name in _NAMES)
    rule = "query [1, Hq, N, D], key and value [1, Hkv, N, D]"
    good = all(len(shape) == 4 and shape[0] == 1 and 0 not in shape for shape in shapes)
    if not good or not _fit(*shapes):
        raise ValueError(f"{path.name} must hold {rule}, got {dict(zip(_NAMES, shapes, strict=True))}")
    scale = header.get("__metadata__", {}).get("scale")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    return SavedHeads(path, digest, shapes, None if scale is None else float(scale))


@torch.no_grad()
def save_heads(
    model: Any,
    ids: Tensor,
    directory: str | Path,
    *,
    layers: Layers = "all",
    dtype: torch.dtype = torch.float16,
) -> list[Path]:
    """Run a model over tokens `[1, N]` as it always does, and save what reaches the attention of some layers.

    Args:
        model: A causal model that `prescore.apply` knows.
        ids: The tokens.
        directory: Where `layer-00.safetensors` and so on go.
        layers: Which layers, as in `prescore.apply`.
        dtype: Of the files.
    """
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise ValueError(f"ids must be one sequence [1, N], got {tuple(ids.shape)}")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = pick_layers(layers, len(find_adapter(model).layers(model)))
    paths = [folder / f"layer-{number:02d}{SUFFIX}" for number in chosen]
    functions: dict[int, Attend] = {
        number: partial(_save_and_attend, path, dtype) for number, path in zip(chosen, paths, strict=True)
    }
    base: nn.Module = model.base_model
    undo = replace_attention(model, functions)
    try:
        # logits of all positions are not needed, and for a large vocabulary do not fit
        base(input_ids=ids, use_cache=False)
    finally:
        undo()
    return paths


def _save_and_attend(
    path: Path, dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext
) -> Tensor:
    from safetensors.torch import save_file

    form = context.form(query, key)
    if form.kind != "causal" or form.valid is not None or query.shape[2] != key.shape[2] or context.is_local:
        what = "a sliding window" if context.is_local else f"a {form.kind} mask"
        raise Unsupported(f"saving layer {context.layer}", [f"it must be causal over all positions, got {what}"])
    found = dict(zip(_NAMES, (query, key, value), strict=True))
    ours = context.scale is None or context.scale == query.shape[-1] ** -0.5
    metadata = {} if ours else {"scale": repr(context.scale)}
    save_file({name: t.detach().to(dtype).contiguous().cpu() for name, t in found.items()}, path, metadata)
    return attend_exactly(query, key, value, context)


def _header(path: Path) -> dict[str, Any]:
    """The names, shapes and metadata of a safetensors file."""
    with path.open("rb") as file:
        begin = file.read(8)
        size = struct.unpack("<Q", begin)[0] if len(begin) == 8 else _LARGEST_HEADER + 1
        text = file.read(size) if size <= _LARGEST_HEADER else b""
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} must be a safetensors file, got {begin!r} at its beginning")
    return header


def _fit(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> bool:
    """Whether shapes are those of one causal layer."""
    grouped = query[1] % key[1] == 0 and key[1] == value[1]
    return grouped and query[2] == key[2] == value[2] and query[3] == key[3]


# Inputs of one causal layer with grouped heads, random or saved, for studies that look closer at one layer.


@dataclass(frozen=True)
class LayerSetting:
    """One layer; every field goes into the record.

    Attributes:
        n: Positions.
        query_heads: Heads of the queries.
        key_heads: Heads of keys and values.
        dim: Of every head.
        dtype: That all run in.
        heads: Name of the file with saved inputs; None = random ones.
        digest: What identifies that file.
        repeats: Timed rounds, or steps.
        memory: See `freed_memory.py`.
    """

    n: int
    query_heads: int = 14
    key_heads: int = 2
    dim: int = 64
    dtype: str = "float32"
    heads: str | None = None
    digest: str | None = None
    repeats: int = 5
    memory: str = SYSTEM


@dataclass(frozen=True)
class LayerInputs:
    """Query `[1, Hq, N, D]`, key and value `[1, Hkv, N, D]`, and the factor of the logits."""

    tensors: Inputs
    scale: float


Measure: TypeAlias = Callable[[LayerSetting, LayerInputs], Values]


def saved_setting(saved: SavedHeads, n: int, *, dtype: str, repeats: int, memory: str) -> LayerSetting:
    """The first `n` positions of a file."""
    (_, query_heads, _, dim), (_, key_heads, _, _), _ = saved.shapes
    return LayerSetting(n, query_heads, key_heads, dim, dtype, saved.name, saved.digest, repeats, memory)


def layer_inputs(setting: LayerSetting, saved: SavedHeads | None, seed: int) -> LayerInputs:
    """What a setting names."""
    dtype: torch.dtype = getattr(torch, setting.dtype)
    scale = None if saved is None else saved.scale
    scale = setting.dim**-0.5 if scale is None else scale
    if saved is not None:
        return LayerInputs(saved.inputs(setting.n, dtype), scale)
    generator = torch.Generator().manual_seed(seed)
    sizes = (setting.query_heads, setting.key_heads, setting.key_heads)
    query, key, value = (
        torch.randn(1, heads, setting.n, setting.dim, generator=generator).to(dtype) for heads in sizes
    )
    return LayerInputs((query, key, value), scale)


def layer_rows(
    study: str, settings: Sequence[tuple[LayerSetting, SavedHeads | None]], measure: Measure, seed: int
) -> list[Row]:
    """Rows of a study that looks at single layers."""

    def measured(setting: LayerSetting, saved: SavedHeads | None) -> Values:
        return measure(setting, layer_inputs(setting, saved, seed))

    return [
        Row({"study": study, **asdict(setting)}, seed, partial(measured, setting, saved), float(setting.n))
        for setting, saved in settings
    ]


# Where the time of routed attention goes, part by part, and how much of the arithmetic limit each part reaches.
#
# Parts that Python sees are run and timed by themselves: what is made of the keys (trees, codes, covariances:
# nodes), the tables that compiled code wants, what lies near, and with it what queries before `exact_until` read
# (beginning). All else is one call with what lies near, of which less is asked for and the differences are taken:
# nothing is looked for (centroids), keys are looked for and none reaches its limit (search), the call as it is
# (rows). The rest of the call is what no part explains: checks, joining. The limit is the multiply-adds a second
# that exact attention reaches in the same run.

PARTS = ("beginning", "nodes", "near", "tables", "centroids", "search", "rows")
REST = "the rest"
Result = TypeVar("Result")


@dataclass
class _Laps:
    """Seconds of named pieces of work, summed, and what the far part counted: keys searched, rows read."""

    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    searched: int = 0
    rows: int = 0

    def timed(self, name: str, work: Callable[[], Result]) -> Result:
        begin = time.perf_counter()
        result = work()
        self.spent[name] += time.perf_counter() - begin
        return result


@torch.no_grad()
def measure_parts(setting: LayerSetting, inputs: LayerInputs) -> Values:
    """Seconds, multiply-adds and share of the limit of every part of `Routed()` on one layer, causal, forward."""
    config, (query, key, value) = Routed(), inputs.tensors
    layout = make_layout(setting.n, setting.n, causal=True, config=config)
    if layout.n_exact == layout.n_query:
        raise ValueError(f"n must be more than {layout.head}, from where on queries are routed, got {setting.n}")
    backend = pick_backend(Needs.of(query))
    call = Call(query, key, value, is_causal=True, scale=inputs.scale, backend=backend)

    def exact() -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=inputs.scale, enable_gqa=True)

    def routed() -> torch.Tensor:
        return prescored_attention(query, key, value, config, is_causal=True, scale=inputs.scale)

    exact()  # the memory that a first call takes from the system is there for the timed ones
    routed()
    work = multiply_adds(call, layout, run_laps(call, layout, config))
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(setting.repeats):
        times[EXACT].append(seconds(exact))
        times["call"].append(seconds(routed))
        for name, spent in run_parts(call, layout, config).items():
            times[name].append(spent)
    median = {name: statistics.median(spent) for name, spent in times.items()}
    return _figures(median, work)


def _figures(median: dict[str, float], work: dict[str, float]) -> Values:
    limit = work[EXACT] / median[EXACT]
    parts: dict[str, Values] = {}
    for name in PARTS:
        rate = work[name] / median[name] if median[name] > 0 and work[name] else None
        parts[name] = {
            "seconds": median[name],
            "share": median[name] / median["call"],
            "multiply_adds": work[name],
            "of_limit": None if rate is None else rate / limit,
        }
    rest = median["call"] - sum(entry["seconds"] for entry in parts.values())
    parts[REST] = {"seconds": rest, "share": rest / median["call"], "multiply_adds": 0.0, "of_limit": None}
    whole = sum(work[name] for name in PARTS)
    return {
        "exact_seconds": median[EXACT],
        "exact_multiply_adds": work[EXACT],
        "call_seconds": median["call"],
        "call_multiply_adds": whole,
        "speedup": median[EXACT] / median["call"],
        "call_of_limit": whole / median["call"] / limit,
        "parts": parts,
    }


def run_parts(call: Call, layout: Layout, config: Routed) -> dict[str, float]:
    """Seconds of every part, in one run."""
    spent = run_laps(call, layout, config).spent
    own = {name: spent[name] for name in ("nodes", "tables")}
    own["beginning"] = spent["beginning"] or spent["beginning and near"] - spent["near"]
    own["near"] = spent["near"] - spent["tables"]  # every call makes them
    own["centroids"] = spent["nothing"] - spent["near"]
    own["search"] = spent["looked"] - spent["nothing"]
    own["rows"] = spent["whole"] - spent["looked"]
    return own


def run_laps(call: Call, layout: Layout, config: Routed) -> _Laps:
    """A routed call piece by piece, its last part three times."""
    laps, n_exact, search = _Laps(), layout.n_exact, lanes.search_of(config)
    compiled = can_build(call.key, call.value, layout, call.backend)
    if n_exact and not compiled:
        laps.timed("beginning", lambda: lanes.attend_beginning(call, layout, n_exact))
    attend = attend_compiled if compiled else _attend_plain
    for whole, lane in zip(lanes.lanes_of(call, 0), lanes.lanes_of(call, n_exact), strict=True):
        sources = laps.timed("nodes", partial(lanes.sources_of, lane, layout, call.backend))
        all_of_it, view = (lanes.view_of(some, layout, search, call.scale, call.backend) for some in (whole, lane))
        if compiled:
            laps.timed("tables", partial(make_tables, sources))
            laps.timed("beginning and near", partial(attend_near_compiled, whole.query, sources, all_of_it))
        near = attend_near_compiled if compiled else attend_near
        laps.timed("near", partial(near, lane.query, sources, view))
        laps.timed("nothing", partial(attend, lane.query, sources, replace(view, search=Search(0.0))))
        # a code that is worth no number reaches no limit
        blind = sources._replace(scales=torch.full_like(sources.scales, torch.nan))
        laps.timed("looked", partial(attend, lane.query, blind, view))
        found = laps.timed("whole", partial(attend, lane.query, sources, view))
        searched, rows = found[2].tolist()
        laps.searched += searched
        laps.rows += rows
    return laps


def _attend_plain(query: Tensor, sources: Sources, view: View) -> tuple[Attended, Tensor, Tensor]:
    return attend_plain(query, sources, view, attend_near(query, sources, view))


def multiply_adds(call: Call, layout: Layout, laps: _Laps) -> dict[str, float]:
    """Multiply-adds of exact attention and of every part, over all heads; making tables has none.

    A key that is read costs `D + Dv`, one that is searched `D`; nodes cost the covariances behind their trees and
    those that queries see, and the projections.
    """
    dim, both = call.key.shape[-1], call.key.shape[-1] + call.value.shape[-1]
    heads, lanes_ = call.query.shape[:2].numel(), call.key.shape[:2].numel()
    position = torch.arange(layout.n_exact, layout.n_query, dtype=torch.long)
    chunks = layout.chunks_seen(position)
    columns = layout.sinks + chunks * layout.nodes_per_chunk
    near = position + 1 - layout.sinks - chunks * layout.chunk
    strides = [max(1, (layout.chunk >> level) // FIT_SIZE) for level in range(layout.levels)]
    each = dim * both + sum(dim * (dim / stride + 1) for stride in strides)
    return {
        EXACT: heads * both * _triangle(layout.n_query),
        "beginning": heads * both * _triangle(layout.n_exact),
        "nodes": lanes_ * layout.n_chunks * layout.chunk * each,
        "near": heads * both * float(near.sum()),
        "tables": 0.0,
        "centroids": heads * both * float(columns.sum()),
        "search": float(laps.searched) * dim,
        "rows": float(laps.rows) * both,
    }


def _triangle(n: int) -> float:
    return n * (n + 1) / 2


# One routed decode step against exact attention's, token after token, as a cache sees them.
#
# Both read the same keys where they lie. Exact attention is timed twice: as a call with grouped heads, and with
# the
# heads of a group folded into the queries of one key head, which reads every key once.

FOLDED, ROUTED = "folded", "routed"
Result_steps = TypeVar("Result_steps")


@torch.no_grad()
def measure_steps(setting: LayerSetting, inputs: LayerInputs) -> Values:
    """Seconds of a step over the last positions of a layer; the first one, which makes the index, apart."""
    decoder, config = LayerCache(), Routed()
    first = setting.n - setting.repeats
    if first < 1:
        raise ValueError(f"n must be more than the {setting.repeats} steps, got {setting.n}")
    index_seconds, _ = _timed(partial(_routed_step, decoder, _at(inputs, first), config, inputs.scale))
    times: dict[str, list[float]] = {EXACT: [], FOLDED: [], ROUTED: []}
    outputs: dict[str, list[Tensor]] = {EXACT: [], ROUTED: []}
    rows, paths = [], set()
    for position in range(first, setting.n):
        now = _at(inputs, position + 1)
        spent, exact = _timed(partial(_exact_step, now, inputs.scale))
        times[EXACT].append(spent)
        times[FOLDED].append(_timed(partial(_folded_step, now, inputs.scale))[0])
        spent, step = _timed(partial(_routed_step, decoder, now, config, inputs.scale))
        times[ROUTED].append(spent)
        outputs[EXACT].append(exact)
        outputs[ROUTED].append(step[0])
        rows.append(step[1])
        paths.add(step[2])
    off = _check_last(setting, inputs, outputs[ROUTED][-1], config)
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    return {
        "seconds": medians,
        "mean_seconds": {name: statistics.fmean(spent) for name, spent in times.items()},
        "spread": {name: max(spent) - min(spent) for name, spent in times.items()},
        "index_seconds": index_seconds,
        "path": sorted(paths),
        "rows": statistics.fmean(rows),
        "speedup": medians[EXACT] / medians[ROUTED],
        "speedup_folded": medians[FOLDED] / medians[ROUTED],
        "error": relative_error(torch.cat(outputs[ROUTED], 2), torch.cat(outputs[EXACT], 2)),
        "rows_off": off,
    }


def _check_last(setting: LayerSetting, inputs: LayerInputs, output: Tensor, config: Routed) -> float:
    """A step is the row of a whole call (in plain torch); one that is not is refused by name."""
    wanted = prescored_attention(
        *_at(inputs, setting.n), config, is_causal=True, scale=inputs.scale, backend="plain"
    )
    return check_rows(f"a routed step at n = {setting.n}", output, wanted)


def _timed(work: Callable[[], Result_steps]) -> tuple[float, Result_steps]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def _at(inputs: LayerInputs, n_keys: int) -> Inputs:
    """The newest query of `n_keys` positions, and views of their keys and values."""
    query, key, value = inputs.tensors
    return query[:, :, n_keys - 1 : n_keys], key[:, :, :n_keys], value[:, :, :n_keys]


def _exact_step(now: Inputs, scale: float) -> Tensor:
    return scaled_dot_product_attention(*now, scale=scale, enable_gqa=True)


def _folded_step(now: Inputs, scale: float) -> Tensor:
    query, key, value = now
    folded = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
    return scaled_dot_product_attention(folded, key, value, scale=scale).flatten(1, 2)[:, :, None]


def _routed_step(decoder: LayerCache, now: Inputs, config: Routed, scale: float) -> tuple[Tensor, float, str]:
    """Output, rows met and the path of a step, as a layer with a cache of ours takes it."""
    query, key, value = now
    step = decoder.step(query, CachedKeys(key, value, None, key.shape[2]), Request(config, scale))
    if step.result is None:
        return _exact_step(now, scale), float(key.shape[2]), step.path
    return step.result.output, sum(step.result.count_reads()), step.path
