"""What travels: few selected rows instead of all keys, however long the sequence is."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from parallel_work import bytes_of, sent_without_figures

from prescore import Exact, Hyper, Routed, Selected

ROOT = Path(__file__).parent.parent.parent
LENGTH = 32768
NOTE = 2048


def busiest(crew, config, n_tokens, is_causal, ranks):
    found = crew.run(bytes_of, config, n_tokens, is_causal, ranks=ranks)
    return max(sent for sent, _ in found), found[0][1]


def all_gathered(n_tokens, ranks):
    """Keys and values of 64 float32 to every other rank, and the note of the handshake."""
    return (ranks - 1) * (n_tokens // ranks * 2 * 64 * 4 + NOTE)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["Selected", "paper"])
def test_selected_sends_a_fifth_at_most_and_no_more_for_longer(crew, name, is_causal):
    config = Selected(top_k=2048) if name == "Selected" else Selected.paper(top_k=2048)
    sent, way = busiest(crew, config, LENGTH, is_causal, 4)
    assert way == "rows"
    assert sent <= all_gathered(LENGTH, 4) / 5
    shorter, _ = busiest(crew, config, LENGTH // 2, is_causal, 4)
    # how many of the selected rows a rank holds differs from text to text; hashes of queries are a byte each
    assert sent <= 1.1 * shorter


@pytest.fixture(scope="module")
def planned():
    path = ROOT / "experiments" / "parallel" / "planned.py"
    spec = importlib.util.spec_from_file_location("planned_bytes_of_ranks", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks its own module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "config",
    [
        Exact(), Routed(), Selected("kmeans", 128, min_seq_len=256), Selected("key-norm", 128, min_seq_len=192),
        Selected.paper(top_k=128, min_seq_len=256),
    ],
    ids=["exact", "routed", "kmeans", "other clusters", "paper"],
)  # fmt: skip
def test_the_plan_tells_what_is_sent(crew, planned, config, is_causal):
    layer = planned.Layer(2048, 4, 1, 1, 64, torch.float32, is_causal)
    wanted = planned.planned_bytes(layer, config)
    found = crew.run(sent_without_figures, config, 2048, is_causal, ranks=4)
    # where the selected keys lie is the one thing that the plan does not know; the handshake would not be seen
    spread = 0.1 * sum(wanted) / 4 if isinstance(config, Selected) else 0.0
    assert found == pytest.approx(wanted, abs=spread)


def test_the_table_of_the_docs_is_that_of_the_plan(planned, capsys):
    planned.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    text = (ROOT / "docs" / "parallel.md").read_text()
    assert [line for line in lines if line not in text] == []


def test_what_gathering_and_heads_send(crew):
    gathered, way = busiest(crew, Exact(), 1024, True, 2)
    assert (gathered, way) == (all_gathered(1024, 2), "gather")
    for config in (Hyper(), Routed()):
        sent, way = busiest(crew, config, 1024, True, 2)
        # one head goes to one rank, so the other sends its half of query, key and value; output and lse come back;
        # a byte says that nothing was refused
        assert (sent, way) == (512 * 3 * 64 * 4 + NOTE + 1, "heads")
