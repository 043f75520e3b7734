"""A layer looked at closer: parts of a call, single steps, and the tables and curves. No timing is asserted."""

import pytest
import torch

from prescore import Routed
from prescore.bench.records import Record, measure
from prescore.bench.speed import heads as steps
from prescore.bench.speed.heads import (
    PARTS,
    REST,
    HeadsSetting,
    LayerSetting,
    heads_row,
    layer_inputs,
    layer_rows,
    measure_parts,
    measure_steps,
    saved_setting,
)
from prescore.bench.speed.tables import curve, curves_plot, heads_table, length_table, parts_table, steps_table

LENGTH = 2700
"""As in the saved heads."""
DEFAULT = Routed()
HEAD = max(DEFAULT.sinks + 2 * DEFAULT.chunk_size, DEFAULT.exact_until)
"""Where the default begins to route."""


def test_parts_add_up_to_the_call(saved):
    setting = saved_setting(saved[0], LENGTH, dtype="float32", repeats=1, memory="system")
    figures = measure_parts(setting, layer_inputs(setting, saved[0], 0))
    parts = figures["parts"]
    assert set(parts) == {*PARTS, REST}
    assert sum(entry["seconds"] for entry in parts.values()) == pytest.approx(figures["call_seconds"])
    assert figures["exact_multiply_adds"] == 4 * 16 * LENGTH * (LENGTH + 1) / 2
    assert 0 < figures["call_multiply_adds"] < figures["exact_multiply_adds"]
    work = {name: entry["multiply_adds"] for name, entry in parts.items()}
    # counted position by position, from the default's sizes
    chunk, sinks, each = DEFAULT.chunk_size, DEFAULT.sinks, DEFAULT.chunk_size // DEFAULT.leaf_size
    routed = range(HEAD, LENGTH)
    assert work["beginning"] == 4 * 16 * HEAD * (HEAD + 1) / 2
    assert work["near"] == 4 * 16 * sum((p - sinks) % chunk + 1 + chunk for p in routed)
    assert work["centroids"] == 4 * 16 * sum(sinks + each * ((p - sinks) // chunk - 1) for p in routed)
    assert work["rows"] % 16 == 0
    assert work["search"] % 8 == 0


def test_parts_of_compiled_code():
    """Heads of 16 numbers, which it runs where there is any; most of its parts are differences of times."""
    setting = LayerSetting(LENGTH, query_heads=2, key_heads=1, dim=16, repeats=1)
    parts = measure_parts(setting, layer_inputs(setting, None, 0))["parts"]
    assert min(parts[name]["multiply_adds"] for name in PARTS if name != "tables") > 0
    assert parts["nodes"]["seconds"] > 0


def test_parts_need_routed_queries():
    with pytest.raises(ValueError, match=f"n must be more than {HEAD}, from where on queries are routed, got 600"):
        measure_parts(setting := LayerSetting(600, dim=16), layer_inputs(setting, None, 0))


@pytest.mark.parametrize(("n", "path"), [(LENGTH, "routed step"), (300, "step over all keys")])
def test_steps_are_rows_of_the_whole_call(saved, n, path):
    setting = saved_setting(saved[0], n, dtype="float32", repeats=3, memory="system")
    figures = measure_steps(setting, layer_inputs(setting, saved[0], 0))
    assert figures["path"] == [path]
    assert figures["rows_off"] == 0.0
    assert set(figures["seconds"]) == {"exact", "folded", "routed"}
    assert (figures["rows"] < n / 2) == (path == "routed step")
    assert (figures["error"] < 1e-9) == (path != "routed step")


def test_folded_steps_are_exact(saved):
    query, key, value = saved[0].inputs(50, torch.float32)
    now = query[:, :, -1:], key, value
    torch.testing.assert_close(steps._folded_step(now, 0.3), steps._exact_step(now, 0.3))


def test_more_steps_than_keys_are_refused():
    with pytest.raises(ValueError, match="n must be more than the 5 steps, got 5"):
        measure_steps(setting := LayerSetting(5, dim=16), layer_inputs(setting, None, 0))


def length_record(n, causal, backward, speeds):
    figures = {"exact_scaled": False, "methods": {"exact": {"seconds": 1.0, "spread": 0.0, "speedup": 1.0}}}
    for name, speed in speeds.items():
        figures["methods"][name] = {"seconds": 1 / speed, "spread": 0.0, "speedup": speed, "limit_share": 0.5}
    config = {"study": "lengths", "n": n, "causal": causal, "backward": backward, "heads": 4}
    return Record("speed", "a", config, 0, figures, 1.0)


def test_curves_of_all_methods_with_exact_at_1(tmp_path):
    speeds = {"hyper": 3.0, "kmeans": 2.5, "kmedian": 2.4, "leverage": 2.0, "default": 4.0}
    records = [
        length_record(n, True, backward, {name: speed * n / 1024 for name, speed in speeds.items()})
        for backward in (False, True)
        for n in (2048, 1024)
    ]
    records.append(length_record(4096, True, False, {"default": 9.0}))
    assert curve(records, "default", True, False) == [(1024, 4.0), (2048, 8.0), (4096, 9.0)]
    assert curve(records, "hyper", True, True) == [(1024, 3.0), (2048, 6.0)]
    assert curve(records, "hyper", False, True) == []
    curves_plot(records, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_tables_show_random_and_real_heads(saved):
    setting = saved_setting(saved[0], LENGTH, dtype="float32", repeats=2, memory="system")
    rows = [
        heads_row(saved[0], HeadsSetting(saved[0].name, saved[0].digest, 64, methods=("default",), repeats=1), 0)
    ]
    for study, look in (("parts", measure_parts), ("steps", measure_steps)):
        rows += layer_rows(study, [(setting, saved[0])], look, 0)
    records = [length_record(1024, True, False, {"hyper": 2.0, "default": 4.0})]
    records += [measure("speed", row) for row in rows]
    table = length_table(records, True, False)
    assert [row[0] for row in table.rows] == ["1024", "exponent", "layer-00 64"]
    assert table.rows[2][2] == "-"  # hyper was not timed there
    assert "x error " in table.rows[2][3]
    assert [row[:2] for row in heads_table(records).rows] == [("layer-00 64", "exact"), ("layer-00 64", "default")]
    assert [row[1] for row in parts_table(records).rows] == ["exact", "the call", *PARTS, REST]
    assert parts_table(records).rows[0][-1] == "100 %"
    assert steps_table(records).rows[0][:2] == ("layer-00 2700", "routed step")
