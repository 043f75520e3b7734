"""What travels: few selected rows instead of all keys, however long the sequence is."""

import pytest
from parallel_work import bytes_of

from prescore import Exact, Hyper, Routed, Selected

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


def test_what_gathering_and_heads_send(crew):
    gathered, way = busiest(crew, Exact(), 1024, True, 2)
    assert (gathered, way) == (all_gathered(1024, 2), "gather")
    for config in (Hyper(), Routed()):
        sent, way = busiest(crew, config, 1024, True, 2)
        # one head goes to one rank, so the other sends its half of query, key and value; output and lse come back;
        # a byte says that nothing was refused
        assert (sent, way) == (512 * 3 * 64 * 4 + NOTE + 1, "heads")
