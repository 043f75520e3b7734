"""What is sent: few selected keys instead of all keys, however long the sequence is."""

import importlib
from pathlib import Path

import pytest
import torch
from parallel_work import bytes_sent

from prescore import Exact, Hyper, KMeans, Leverage, Routed, Selected

LENGTH = 32768
NOTE = 2048
SAMPLED = KMeans(fit_size=2080)


def busiest(crew, config, n_tokens, is_causal, ranks):
    sent, exchanges = zip(*crew.run(bytes_sent, config, n_tokens, is_causal, True, ranks=ranks), strict=True)
    return max(sent), exchanges[0]


def all_gathered(n_tokens, ranks):
    """Keys and values of 64 float32 to every other rank, and the note of the handshake."""
    return (ranks - 1) * (n_tokens // ranks * 2 * 64 * 4 + NOTE)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["default", "paper"])
def test_selected_sends_a_fifth_at_most_and_no_more_for_longer_sequences(crew, name, is_causal):
    config = Selected(top_k=2048) if name == "default" else Selected.paper(SAMPLED, top_k=2048)
    sent, exchange = busiest(crew, config, LENGTH, is_causal, 4)
    assert exchange == "selected"
    assert sent <= all_gathered(LENGTH, 4) / 5
    shorter, _ = busiest(crew, config, LENGTH // 2, is_causal, 4)
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
        Selected.paper(SAMPLED, top_k=128, min_seq_len=256), Selected(Leverage(), 64, min_seq_len=256),
    ],
    ids=["exact", "routed", "kmeans", "other clusters", "paper", "leverage"],
)  # fmt: skip
def test_the_plan_counts_what_is_sent(crew, planned, config, is_causal):
    wanted = planned.planned_bytes(planned.Layer(2048, 4, 1, 1, 64, torch.float32, is_causal), config)
    sent = [n for n, _ in crew.run(bytes_sent, config, 2048, is_causal, False, ranks=4)]
    # the plan does not know where the selected keys lie
    spread = 0.1 * sum(wanted) / 4 if isinstance(config, Selected) else 0.0
    assert sent == pytest.approx(wanted, abs=spread)
    planned.main()  # the table of the documentation


def test_what_all_gather_and_ulysses_send(crew):
    assert busiest(crew, Exact(), 1024, True, 2) == (all_gathered(1024, 2), "all-gather")
    for config in (Hyper(), Routed()):
        # one head goes to one rank, so the other sends its half of query, key and value; output and lse come back;
        # one byte says that no rank refused
        assert busiest(crew, config, 1024, True, 2) == (512 * 3 * 64 * 4 + NOTE + 1, "ulysses")
