"""Bytes that ranks send, counted on processes of this machine."""

from functools import partial

from prescore.bench.records import Row, measure


def test_what_two_ranks_send(load_script):
    ranks = load_script("parallel/ranks.py")
    config = {
        "study": "parallel", "n": 256, "ranks": 2, "causal": True, "backward": True, "heads": 2, "dim": 8,
        "dtype": "float32", "repeats": 1, "top_k": 8, "min_seq_len": 32,
    }  # fmt: skip
    record = measure("speed", Row(config, 0, partial(ranks.measure_parallel, config, 0)))
    methods = record.results["methods"]
    assert {name: method["exchange"] for name, method in methods.items()} == {
        "all-gather": "all-gather", "selected": "selected", "paper": "selected", "hyper": "ulysses",
        "default": "ulysses",
    }  # fmt: skip
    # keys and values to the other rank, their gradients back, and the note of the handshake
    assert methods["all-gather"]["bytes"] == 2 * 128 * 2 * 16 * 4 + 2048
    assert methods["selected"]["of_all_gather"] < 1
    table = ranks.ranks_table([record])
    assert len(table.rows) == len(methods)
    assert table.rows[0][:5] == ("causal, forward + backward", "256", "2", "all-gather", "all-gather")
    assert table.rows[0][6] == "1.000"
