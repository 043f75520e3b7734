"""Rows per query against counts made one query at a time."""

import time

import pytest
import torch

from prescore.bench.language.methods import Meter, baseline_rows, exact_rows, leaf_rows


def test_plain_counts():
    assert exact_rows(5) == 3.0
    assert leaf_rows(6, 4) == pytest.approx((1 + 2 + 3 + 4 + 1 + 2) / 6)


def test_streaming_counts_sinks_outside_the_window_once():
    seen = [len({*range(max(0, i - 3), i + 1), *range(min(2, i + 1))}) for i in range(9)]
    assert baseline_rows("streaming", 9, {"window": 4, "sinks": 2}) == pytest.approx(sum(seen) / 9)


def test_chunked_baselines_count_their_chunk_and_at_most_the_budget():
    seen = [i % 4 + 1 + min(3, i // 4 * 4) for i in range(10)]
    assert baseline_rows("oracle", 10, {"chunk_size": 4, "budget": 3}) == pytest.approx(sum(seen) / 10)


def test_meter_sums_layers_and_tells_replaced_ones_apart():
    meter = Meter(replaced=frozenset([1]))
    for layer in (0, 1):
        meter.timed(layer, lambda: torch.zeros(1), torch.device("cpu"))
    assert set(meter.processor_seconds) == {0, 1}
    meter.seconds, meter.processor_seconds = {0: 1.0, 1: 2.0}, {0: 0.5, 1: 1.0}
    meter.rows[1] = 7.0
    meter.exact_rows[0] = 13.0
    assert meter.figures() == {
        "attention_seconds": 3.0,
        "attention_processor_seconds": 1.5,
        "replaced_seconds": 2.0,
        "layers_replaced": 1,
        "keys_per_query": 10.0,  # over both layers
        "replaced_rows_per_query": 7.0,
    }


def test_waiting_is_time_but_not_processor_time():
    meter = Meter()

    def wait():
        time.sleep(0.05)
        return torch.zeros(1)

    meter.timed(0, wait, torch.device("cpu"))
    figures = meter.figures()
    assert figures["attention_processor_seconds"] < figures["attention_seconds"]
    assert Meter().figures()["attention_processor_seconds"] is None
