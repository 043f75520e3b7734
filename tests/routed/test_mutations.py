"""The mutation table: each row breaks one line of the engine on purpose, and a named check must fail.

A break in Python replaces the code of the function that holds the line, so that every importer runs it, or a
constant wherever it is used. A break in C is compiled into a folder of its own and loaded from there.
"""

import importlib
import subprocess
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from breaks import Break
from decode_checks import NATIVE as NATIVE_STEPS
from decode_checks import SMALL, check_crop, check_reorder, check_steps
from oracles import routed
from oracles.inputs import attention_tensors
from routed_checks import check_native, check_reference, check_routed, check_stats, oracle_truth

from prescore import Routed
from prescore.routed import layout
from prescore.routed.native import build, library

WIDE = SMALL.replace(cluster_size=32, chunk_size=32)
"""Clusters of two subclusters."""
NATIVE = Routed(min_weight=1 / 32, cluster_size=32, chunk_size=64, sinks=3, exact_until=0)


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    """Spans of 16 clusters, so that small calls see some."""
    for module, name in ((layout, "SPAN_CLUSTERS"), (routed, "SPAN")):
        monkeypatch.setattr(module, name, 16)


# --- checks


@cache
def small_case(name):
    """Configuration, tensors, options and truth of a float64 call."""
    config, options = SMALL, {"is_causal": not name.startswith("full")}
    sizes = {"heads": 2, "kv_heads": 1, "n_keys": 104, "dim": 20, "value_dim": 5}
    sizes |= {"batch": {"full padded": 2, "batch": 3}.get(name, 1), "n_query": 50 if name == "batch" else 104}
    tensors, position = attention_tensors(**sizes, seed=6), torch.arange(104)
    if name == "subclusters":
        config = WIDE
        tensors[1][:, :, 10::32] *= 4
    if name == "sharp":
        config = WIDE.replace(min_weight=1 / 1024)
        tensors[0].mul_(40.0)
    if name == "holes":
        options["mask"] = (position.remainder(20) != 3)[None]
    elif name == "full padded":
        options["mask"] = position < torch.tensor([[104], [81]])
    elif name == "batch":
        options["mask"] = position >= torch.tensor([[0], [29], [11]])
    return config, tensors, options, oracle_truth(config, tensors, **options)


def plain(name):
    config, tensors, options, truth = small_case(name)
    check_routed(config, tensors, **options, truth=truth)


def reference():
    config, tensors, _, truth = small_case("causal")
    check_reference(config, tensors, truth=truth)


def stats():
    config, tensors, _, _ = small_case("subclusters")
    check_stats(config, tensors)


def native_tensors(n_keys=330):
    sizes = {"heads": 4, "kv_heads": 2, "n_keys": n_keys, "dim": 32, "value_dim": 48}
    tensors = attention_tensors(**sizes, spread=1.0, dtype=torch.float32)
    tensors[1][:, :, 10::32] *= 4
    return tensors


def native():
    check_native(NATIVE, native_tensors())


def native_spans():
    check_native(NATIVE.replace(cluster_size=16), native_tensors(800), is_causal=True)


def native_sharp():
    query, *others = native_tensors()
    # logits of hundreds: float32 rounds them to 3e-5, and weights to as much
    check_native(NATIVE.replace(min_weight=1 / 1024), [40 * query, *others], budget=2e-3, gradients=False)


def native_forward():
    """Without gradients native code builds the index and reads the first queries too."""
    check_native(NATIVE.replace(exact_until=280), native_tensors(), gradients=False)


def decode():
    check_steps(SMALL)
    check_crop(SMALL, 130)
    check_reorder(SMALL, [2, 0, 0])


SMALL_CASES = ("causal", "full", "subclusters", "sharp", "holes", "full padded", "batch")
CHECKS = {
    **{name: partial(plain, name) for name in SMALL_CASES},
    "reference": reference,
    "stats": stats,
    "decode": decode,
    "native": native,
    "native spans": native_spans,
    "native sharp": native_sharp,
    "native forward": native_forward,
    "native decode": partial(check_crop, NATIVE_STEPS, 130),
}
NATIVE_CHECKS = ("native", "native spans", "native sharp", "native forward", "native decode")

# --- the table


BREAKS = {
    ("reference.py", "subclusters"): [
        ("searched within one deviation", ".clamp_min(SEARCH_STDS) * logits.std", " * 0 + logits.std"),
        ("half of the spread", "(squares @ shares.t()).sqrt()", "(squares @ shares.t()).sqrt() / 2"),
        ("no radius", "reach * index.radius", "0 * reach * index.radius"),
    ],
    ("reference.py", "sharp"): [
        ("light keys read exactly", "LIGHT_WEIGHT = 64", "LIGHT_WEIGHT = 1"),
        ("int8 errors overlooked", "HEAVY_INT8_ERROR = 0.1", "HEAVY_INT8_ERROR = 0.0"),
        ("other weight of heavy keys", "HEAVY_WEIGHT = 0.05", "HEAVY_WEIGHT = 0.9"),
    ],
    ("reference.py", "causal"): [
        ("sinks count in full", "SINK_WEIGHT = 0.1", "SINK_WEIGHT = 1.0"),
        ("gain unbounded", "MAX_GAIN = 2.0", "MAX_GAIN = inf"),
        ("threshold without the gain", "MAX_MASS_GAIN = 4.0", "MAX_MASS_GAIN = 0.0"),
        ("half the weight", "-math.log(min_weight) if", "math.log(2) - math.log(min_weight) if"),
        ("int8 of keys, not of offsets", "quantize_keys(key_offset.detach())", "quantize_keys(keys.detach())"),
        (
            "tree without power iterations",
            "layout.cluster_size))\n",
            "layout.cluster_size), power_iterations=0)\n",
        ),
        ("covariances of one chunk", "totals / count.to(totals.dtype)", "getattr(index, name)"),
        (
            "spans are a cluster longer",
            "interleave(index.clusters_per_span,",
            "interleave(index.clusters_per_span + 1,",
        ),
        ("keys read stay in the centroid", "[1] - per_cluster", "[1] - 0 * per_cluster"),
        ("no gain", "0.5 * std * std + shifted - unshifted", "0 * (shifted - unshifted)"),
        ("values do not move", "(1 - slope / std).clamp(-1, 1)", "0 * slope"),
        ("stricter search", "return distance[..., None].masked", "return (distance + 0.5)[..., None].masked"),
        ("threshold without gradients", "(shares - shares.detach())", "0 * shares"),
    ],
    ("reference.py", "full"): [
        ("mean of one chunk too many", "/ count.to(totals.dtype)", "/ (count.to(totals.dtype) + 1)"),
    ],
    ("reference.py", "stats"): [
        ("wrong count of int8 keys", "+ near.sum() * n_subclusters", "+ 0 * near.sum()"),
    ],
    ("reference.py", "reference"): [
        ("covariance of the first chunk", "index.key_cov[0, span].mean(0)", "index.key_cov[0, span][0]"),
        ("sinks forgotten", "& ~is_far, query @", "& ~is_far & ~is_sink, query @"),
    ],
    ("plain.py", "causal"): [
        ("coarser queries", "quantize(query, QUERY_MAX)", "quantize(query, 7)"),
        ("local mass counted twice", "add_mass(mass + local_mass,", "add_mass(mass + 2 * local_mass,"),
        ("query gradient without the scale", "+ by_query) * view.scale).view", "+ by_query) * 1.0).view"),
        ("no gradient through keys read", "by_logit), parts[0]", "0 * by_logit), parts[0]"),
        ("no gradient through centroids", ".shape[0]] += grads[name]", ".shape[0]] += 0 * grads[name]"),
        ("no gradient through spans", "+= grads[name][:-1]", "+= 0 * grads[name][:-1]"),
        ("no gradient through key_cov", 'name in ("key_cov", "key_value_cov"):', 'name in ("key_value_cov",):'),
        ("no gradient through key_value_cov", 'name in ("key_cov", "key_value_cov"):', 'name in ("key_cov",):'),
        ("other keys in the backward pass", "seen), thresholds, v", "seen), thresholds + 0.5, v"),
        ("the mass has no gradient", "-block.take(product))", "0 * block.take(product))"),
        ("own chunk not causal", "scale, causal=True)", "scale, causal=False)"),
        ("own keys without gradients", "rows] += from_square[:, 0]", "rows] += 0 * from_square[:, 0]"),
    ],
    ("plain.py", "full"): [
        (
            "the first local key is lost",
            "start = int(view.local_start[0, 0])\n        return",
            "start = int(view.local_start[0, 0]) + 1\n        return",
        ),
    ],
    ("attention.py", "holes"): [
        ("gaps overlooked", "gaps, n_counted), dim=1)", "gaps & False, n_counted), dim=1)"),
    ],
    ("attention.py", "batch"): [
        (
            "sequences in another order, with gradients",
            "torch.cat(tensors) for tensors in zip(*rows",
            "torch.cat(tensors[::-1]) for tensors in zip(*rows",
        ),
        ("sequences in another order", "in enumerate(zip(parts, firsts,", "in enumerate(zip(parts[::-1], firsts,"),
    ],
    ("attention.py", "causal"): [
        (
            "threshold passes nothing to local keys",
            "merged.output.to(wide), more)",
            "merged.output.to(wide), 0 * more)",
        ),
        ("lse without a gradient", "grad, output = fold_lse_gradient(", "_ = fold_lse_gradient("),
    ],
    ("attention.py", "stats"): [
        ("far keys counted as local", "- chunks * layout.chunk_size + read", "- 0 * chunks + read"),
    ],
    ("layout.py", "causal"): [
        ("the first covariance for all", "(n_clusters - 1) //", "0 * (n_clusters - 1) //"),
        ("one chunk less is far", "// self.chunk_size - 1).clamp", "// self.chunk_size - 2).clamp"),
    ],
    ("layout.py", "full padded"): [
        ("one full chunk less", "else rest // chunk_size", "else rest // chunk_size - 1"),
    ],
    ("layout.py", "native forward"): [
        ("exact queries route", "position < self.exact_until, 0)", "position < 0, 0)"),
    ],
    ("decode.py", "decode"): [
        ("covariance after a step back", "shape[1] - 1 - n_behind", "shape[1] - 1"),
        ("centroids count as keys", "layout.n_keys - layout.n_chunks *", "layout.n_keys - 0 *"),
    ],
    ("index.py", "decode"): [
        ("covariance of new chunks only", "filled[:, n_before - 1] = before[:, 0]", "pass"),
        ("crop forgets nothing", "if n_keys < self._end:", "if False:"),
        ("beams stay", "self._kv_heads)).index_select(0, rows)", "self._kv_heads))"),
    ],
    ("native.py", "native"): [
        ("values move further", ", index.key_value_cov), 1)", ", index.key_value_cov * 1.01), 1)"),
        ("sinks count in full in C", "math.log(SINK_WEIGHT)", "0.0"),
        ("one thread's gradients", "part.sum(0) for name, part", "part[0] for name, part"),
        ("no product in C", "(grads * merged.output).sum(-1)", "0 * grads.sum(-1)"),
    ],
    ("native.py", "native decode"): [
        ("a step misses its own key", "(self._stop, n_keys - n_far)", "(self._stop, n_keys - n_far - 1)"),
    ],
    ("search.c", "native"): [
        ("searched within half a deviation", "heavy > p->search_stds ? heavy : p->search_stds", "0.5f"),
        ("spread overlooked", "load(p->spread + at) * reach + x", "x"),
        (
            "radius overlooked",
            "load(radius + k * WIDTH) * splat(b->reach[t]) + load(logits",
            "load(logits",
        ),
        ("a query of the tile left out", "t < w->n && w->threshold", "t < w->n - 1 && w->threshold"),
        (
            "a subcluster of a block left out",
            "i < 16; i++) {\n            const uint32_t some",
            "i < 15; i++) {\n            const uint32_t some",
        ),
        ("hits of another query", "w->products + pair * 16 + k", "w->products + k"),
        ("unit of another subcluster", "splat(p->scales[b->at * 16 + i] * w", "splat(p->scales[b->at * 16] * w"),
        ("bounds that are too high", "round_up(smaller(", "1000 + round_up(smaller("),
    ],
    ("search.c", "native sharp"): [
        ("int8 errors overlooked", "(lowered > 0 ? lowered : 0)", "0"),
    ],
    ("int8.h", "native"): [
        ("int8 offset", "to[key] = start;", "to[key] = start / 2;"),
        ("a dimension left out", "for (int k = 0; k < 4; k++) to[key]", "for (int k = 0; k < 3; k++) to[key]"),
    ],
    ("centroids.h", "native"): [
        ("gain without the cut", "* below * (one + by_z);", ";"),
        ("no move", "within(one - by_x * below", "within(0.0f * one - 0.0f * by_x * below"),
        ("slope of the gain", "splat(s) - by_x, zero)", "splat(s), zero)"),
    ],
    ("forward.c", "native"): [
        ("keys read stay in the centroid", "left = size - __builtin", "left = size - 0.0f * __builtin"),
        ("coarser query", "largest(most) / 127.0f", "largest(most) / 7.0f"),
        ("threshold too low", "- p->log_inverse;", "- 1.1f * p->log_inverse;"),
    ],
    ("routed.h", "native"): [
        ("the last span under its first chunk", "(w->clusters - 1) / p->clusters_per_cov", "0"),
    ],
    ("routed.h", "native spans"): [
        ("every span under the covariance of the last", "span + 1 < w->spans ? span :", "span + 1 < 0 ? span :"),
        ("spans begin too late", "(span + 1) * p->clusters_per_span :", "(span + 2) * p->clusters_per_span :"),
    ],
    ("native.py", "native spans"): [
        ("no gradient through spans in C", "totals[name].tensor_split(", "(0 * totals[name]).tensor_split("),
    ],
    ("local.c", "native"): [
        ("later keys are read", "for (int64_t c = stop; c < n; c++)", "for (int64_t c = n; c < n; c++)"),
    ],
    ("local.c", "native forward"): [
        ("masses under the old maximum", "*mass * scale + total(added)", "*mass + total(added)"),
    ],
    ("index.c", "native forward"): [
        ("other int8 units", "numbers[i] = (uint8_t)whole[i]", "numbers[i] = (uint8_t)(128 - whole[i])"),
        ("no spread", "sqrtf(square / 16.0f)", "0.0f"),
        ("no power iterations", "step < 3", "step < 0"),
        ("double covariance", "1.0f / (float)c->chunk_size", "2.0f / (float)c->chunk_size"),
    ],
    ("backward.c", "native"): [
        ("no gradient through the deviation", "s > MIN_STD ? (b->by_std[i]", "s < 0 ? (b->by_std[i]"),
        ("threshold passes nothing to local keys", "= by_threshold_total;", "= 0;"),
        ("threshold passes nothing to centroids", "if (by_threshold_total != 0)", "if (0)"),
        ("values of hits", "grad, weight, wide);", "grad, 1.01f * weight, wide);"),
    ],
}
"""By file and the check that must fail: what breaks, the text, its replacement."""

# --- how a break is made


def break_python(monkeypatch, name, text, replacement):
    """Run a module of the engine with one text replaced, wherever it was imported."""
    constant, _, number = replacement.partition(" = ")
    if not constant.isupper():
        Break(f"routed.{name}", text, replacement).apply(monkeypatch)
        return
    modules = [importlib.import_module(f"prescore.routed.{each}") for each in ("native", "plain", "reference")]
    source = Path(importlib.import_module(f"prescore.routed.{name}").__file__).read_text()
    assert source.count(f"\n{text}\n") == 1, f"{text!r} must be a line of {name}.py"
    for module in [each for each in modules if constant in vars(each)]:
        monkeypatch.setattr(module, constant, type(vars(module)[constant])(number))


def compile_c(command, *files):
    command = [build.find_command()[0], *command, *map(str, files)]
    subprocess.run(command, check=True, capture_output=True, text=True)


# the code for every processor, without vector instructions of its own
FLAGS = [*(flag for flag in build._FLAGS if flag not in ("-O3", "-shared")), "-O1", *build.PLAIN_FLAGS]


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Every C file of the engine, compiled."""
    command = build.find_command()
    if isinstance(command, str):
        pytest.skip(command)
    folder = tmp_path_factory.mktemp("objects")
    for path in build.c_files():
        compile_c([*FLAGS, "-I", str(build.FOLDER), "-c", "-o"], folder / f"{path.stem}.o", path)
    return folder


def load_c(monkeypatch, objects, folder, file=None, text="", replacement=""):
    """Load a library with one text of one file replaced."""
    linked = {path.stem: path for path in objects.glob("*.o")}
    for path in build.FOLDER.glob("*.[ch]"):
        source = path.read_text()
        if path.name == file:
            assert source.count(text) == 1, f"{text!r} must occur once in {file}, got {source.count(text)}"
            source = source.replace(text, replacement)
        (folder / path.name).write_text(source)
    for path in folder.glob("*.c"):
        if path.name == file or (file is not None and f'#include "{file}"' in path.read_text()):
            linked[path.stem] = folder / f"{path.stem}.o"
            compile_c([*FLAGS, "-c", "-o"], linked[path.stem], path)
    made = folder / build.library_name("baseline")
    compile_c([*FLAGS, "-shared", "-o"], made, *linked.values(), "-lm")
    build.checksum_file(made).write_text(build.checksum(made))
    monkeypatch.setattr(library, "_FOLDER", folder)
    monkeypatch.setattr(library, "_found", {})
    monkeypatch.setenv(library.VARIABLE, "baseline")


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_passes_on_the_engine_as_it_is(name, monkeypatch, objects, tmp_path):
    load_c(monkeypatch, objects, tmp_path)
    CHECKS[name]()


ROWS = [(*place, *row) for place, rows in BREAKS.items() for row in rows]


@pytest.mark.parametrize("row", ROWS, ids=[f"{file}: {name}" for file, _, name, _, _ in ROWS])
def test_a_break_is_caught(row, request, monkeypatch, tmp_path):
    file, check, _, text, replacement = row
    if file.endswith(".py"):
        if check in NATIVE_CHECKS and library.loaded_level() == library.NO_LEVEL:
            pytest.skip("no native library is built")
        break_python(monkeypatch, file.removesuffix(".py"), text, replacement)
    else:
        load_c(monkeypatch, request.getfixturevalue("objects"), tmp_path, file, text, replacement)
    with pytest.raises(AssertionError):
        CHECKS[check]()
