"""What is sent: few selected keys instead of all keys, however long the sequence is."""

import importlib
from pathlib import Path

import pytest
import torch
from parallel_work import bytes_sent

from prescore import Exact, Hyper, KMeans, Leverage, Routed, Selected

LENGTH = 32768
SAMPLED = KMeans(fit_size=2080)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["default", "paper"])
def test_selected_sends_a_fifth_at_most_and_no_more_for_longer_sequences(crew, name, is_causal):
    config = Selected(top_k=2048) if name == "default" else Selected.paper(SAMPLED, top_k=2048)
    sent, shorter = (max(crew.run(bytes_sent, config, n, is_causal, ranks=4)) for n in (LENGTH, LENGTH // 2))
    # of an all-gather, which sends keys and values of 64 float32 to every other rank
    assert sent <= 3 * LENGTH // 4 * 2 * 64 * 4 / 5
    # how many of the selected keys a rank holds differs from text to text; hashes of queries are a byte each
    assert sent <= 1.1 * shorter


@pytest.fixture
def planned(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent.parent / "experiments" / "parallel")
    return importlib.import_module("planned")


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "config",
    [
        Exact(), Routed(), Selected("kmeans", 128, min_seq_len=256), Selected("key-norm", 128, min_seq_len=192),
        Selected.paper(SAMPLED, top_k=128, min_seq_len=256), Selected(Leverage(), 64, min_seq_len=256), Hyper(),
    ],
    ids=["exact", "routed", "kmeans", "other clusters", "paper", "leverage", "hyper"],
)  # fmt: skip
def test_the_plan_counts_what_is_sent(crew, planned, config, is_causal):
    wanted = planned.planned_bytes(planned.Layer(2048, 4, 1, 1, 64, torch.float32, is_causal), config)
    sent = crew.run(bytes_sent, config, 2048, is_causal, ranks=4)
    # the plan does not know where the selected keys lie
    spread = 0.1 * sum(wanted) / 4 if isinstance(config, Selected) else 0.0
    assert sent == pytest.approx(wanted, abs=spread)
    planned.main()  # the table of the documentation
