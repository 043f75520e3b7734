"""The model of GPUs: counts of tiles of queries, and the times that follow from them."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from routed_checks import needs_native

from prescore import Routed, prescored_attention
from prescore.bench.records import read_records
from prescore.bench.speed.heads import find_heads
from prescore.routed import triton

CONFIG = {"n": 4096, "dim": 16, "query_heads": 4, "kv_heads": 2, "heads": "random", "tiles": 2}


EXPERIMENTS = Path(__file__).parents[2] / "experiments"
gpu_model = SimpleNamespace(**runpy.run_path(str(EXPERIMENTS / "gpu" / "gpu_model.py")))


@pytest.fixture(scope="module")
def saved(heads):
    return find_heads(heads)[0]


@pytest.fixture(scope="module")
def results(saved):
    return gpu_model.count_tiles(CONFIG, 0, saved)


def test_unions_grow_with_the_rows_of_a_tile_and_never_exceed_all_keys(results):
    assert len(results["bands"]) == len(gpu_model.BANDS)
    for band in results["bands"]:
        for name, most in (("near", 1.0), ("searched", 1.0), ("scanned", 1.0), ("hits", band["far_keys"])):
            for shapes in (("one", *gpu_model.ROWS), ("one", "step")):
                counts = [band[f"{name}_{shape}"] for shape in shapes]
                assert counts == sorted(counts)
                assert 0 < counts[0] <= counts[-1] <= most
        assert band["hits_one"] < band["hits_64"]
        for shape in ("one", "step", *gpu_model.ROWS):
            assert band[f"searched_{shape}"] <= band[f"scanned_{shape}"] <= band[f"near_{shape}"]


@needs_native
def test_a_query_reads_as_many_far_keys_as_in_the_library(saved, results):
    query, key, value = saved.inputs(4096)
    last = query[:, :, -256:]  # the queries of the last band lie in a chunk before them
    stats = prescored_attention(last, key, value, Routed(), is_causal=True, return_aux=True)[1].stats
    # 16 runs of neighbours are no exact sample of all queries
    assert results["bands"][-1]["hits_one"] == pytest.approx(stats.far_keys_read, rel=0.25)


def test_exact_attention_is_quadratic_and_searching_less_is_faster(results):
    times = [gpu_model.predict(CONFIG, results, "H100", n, 64) for n in (2**17, 2**18)]
    assert times[1]["FlashAttention"] == pytest.approx(4 * times[0]["FlashAttention"])
    half = {**results, "bands": [{**b, "scanned_64": b["scanned_64"] / 2} for b in results["bands"]]}
    less = gpu_model.predict(CONFIG, half, "H100", 2**17, 64)
    assert less["scan"] == pytest.approx(times[0]["scan"] / 2, rel=0.01)
    assert {name for name in less if less[name] != times[0][name]} == {"scan"}


def test_a_step_costs_launches_and_bytes(results):
    def step(batch=1, in_graph=True, **options):
        return gpu_model.predict_step(CONFIG, results, "A100", 2**17, 64, batch, in_graph=in_graph, **options)

    alone, many = step(), step(32)
    for name, fixed in (("kernels", gpu_model.GRAPH), ("exact", gpu_model.EXACT_STEP)):
        assert many[name] - fixed == pytest.approx(32 * (alone[name] - fixed))
    launches = gpu_model.STEP_LAUNCHES * gpu_model.LAUNCH
    assert step(in_graph=False)["kernels"] - alone["kernels"] == pytest.approx(launches - gpu_model.GRAPH)
    assert step(key_bytes=1)["exact"] < alone["exact"]


def test_the_growth_is_the_exponent_of_a_power():
    bands = [{"far_keys": n, "hits": 3 * n**0.5} for n in (1000, 2000, 4000)]
    assert gpu_model.growth(bands, "hits") == pytest.approx(0.5)


def test_there_are_tables_of_prompts_and_steps_for_each_gpu_with_assumptions(results):
    record = SimpleNamespace(config=CONFIG, results=results)
    tiles, *tables = gpu_model.gpu_tables([record])
    assert len(tiles.rows) == 2 + len(gpu_model.ROWS)
    assert [table.title.split(",")[0] for table in tables[::2]] == list(gpu_model.GPUS)
    for table, gpu in zip(tables[::2], gpu_model.GPUS.values(), strict=True):
        assert f"FlashAttention {gpu.exact[64]}" in table.note
        assert len(table.rows) == 2 * len(gpu_model.LENGTHS)


@pytest.mark.parametrize("name", list(gpu_model.GPUS))
def test_auto_is_exact_up_to_the_predicted_gain(name):
    """`GAINS_FROM`: the length from which the ratio is at least 1.2 with both head dimensions."""
    records, least = read_records(EXPERIMENTS / "gpu" / "records.jsonl"), []
    for ratio, more in ((gpu_model.ratio, {}), (gpu_model.step_ratio, {"batch": 1, "in_graph": False})):
        found = None
        for n in reversed(gpu_model.LENGTHS):
            if min(ratio(records, name, n, dim, **more) for dim in (64, 128)) < 1.2:
                break
            found = n
        least.append(found)
    assert triton.GAINS_FROM[gpu_model.GPUS[name].target] == tuple(least)


def test_heads_that_are_too_short_are_refused():
    short = torch.zeros(1, 2, 1024, 16), torch.zeros(1, 1, 1024, 16), torch.zeros(1, 1, 1024, 16)
    with pytest.raises(ValueError, match="n must be at least 4096, got 1024"):
        gpu_model.measure_tiles(CONFIG, *short, 0.25, 0)
