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
        for name, most in (("near", 1.0), ("searched", 1.0), ("hits", band["far_keys"])):
            counts = [band[f"{name}_{rows}"] for rows in (1, *gpu_model.ROWS)]
            assert counts == sorted(counts)
            assert 0 < counts[0] <= counts[-1] <= most
        assert band["hits_1"] < band["hits_128"]
        assert band["searched_1"] <= band["near_1"]


@needs_native
def test_a_query_reads_as_many_far_keys_as_in_the_library(saved, results):
    query, key, value = saved.inputs(4096)
    last = query[:, :, -256:]  # the queries of the last band lie in a chunk before them
    stats = prescored_attention(last, key, value, Routed(), is_causal=True, return_aux=True)[1].stats
    # 16 tiles of 32 neighbours are no exact sample of all queries
    assert results["bands"][-1]["hits_1"] == pytest.approx(stats.far_keys_read, rel=0.25)


def test_exact_attention_is_quadratic_and_searching_less_is_faster(results):
    times = [gpu_model.predict(CONFIG, results, gpu_model.GPUS["H100"], n, 64) for n in (2**17, 2**18)]
    assert times[1]["FlashAttention"] == pytest.approx(4 * times[0]["FlashAttention"])
    half = {**results, "bands": [{**b, "searched_64": b["searched_64"] / 2} for b in results["bands"]]}
    less = gpu_model.predict(CONFIG, half, gpu_model.GPUS["H100"], 2**17, 64)
    assert less["int8 keys"] == pytest.approx(times[0]["int8 keys"] / 2, rel=0.01)
    assert {name for name in less if less[name] != times[0][name]} == {"int8 keys"}


def test_the_growth_is_the_exponent_of_a_power():
    bands = [{"far_keys": n, "hits": 3 * n**0.5} for n in (1000, 2000, 4000)]
    assert gpu_model.growth(bands, "hits") == pytest.approx(0.5)


def test_there_is_a_table_for_each_gpu_with_its_assumptions(results):
    record = SimpleNamespace(config=CONFIG, results=results)
    tiles, *tables = gpu_model.gpu_tables([record])
    assert len(tiles.rows) == 1 + len(gpu_model.ROWS)
    assert [table.title.split(",")[0] for table in tables] == list(gpu_model.GPUS)
    for table, gpu in zip(tables, gpu_model.GPUS.values(), strict=True):
        assert f"FlashAttention {gpu.exact}" in table.note
        assert len(table.rows) == len(gpu_model.LENGTHS) * (len(gpu_model.ROWS) + 1)


@pytest.mark.parametrize(
    ("target", "name"), [("sm_80", "A100"), ("sm_90", "H100"), ("sm_100", "B200"), ("gfx942", "MI300X")]
)
def test_auto_is_exact_up_to_the_predicted_gain(target, name):
    """`GAINS_FROM`: the shortest length from which every longer one gains, with the tiles that the backend has."""
    records = read_records(EXPERIMENTS / "gpu" / "records.jsonl")
    rows, least = triton.launch(target, 64, 64, torch.bfloat16).rows, None
    for n in reversed(gpu_model.LENGTHS):
        each = [
            gpu_model.predict(record.config, record.results, gpu_model.GPUS[name], n, rows) for record in records
        ]
        exact = sum(times.pop("FlashAttention") for times in each)
        if exact <= sum(sum(times.values()) for times in each):
            break
        least = n
    assert triton.GAINS_FROM[target] == least


def test_heads_that_are_too_short_are_refused():
    short = torch.zeros(1, 2, 1024, 16), torch.zeros(1, 1, 1024, 16), torch.zeros(1, 1, 1024, 16)
    with pytest.raises(ValueError, match="n must be at least 4096, got 1024"):
        gpu_model.measure_tiles(CONFIG, *short, 0.25, 0)
