"""Device meshes, heads of each rank, bytes sent; wrong use is refused in one sentence on every rank."""

import importlib
import re
from pathlib import Path

import parallel_work as work
import pytest
import torch
from crew import Crew
from oracles.inputs import attention_tensors
from routed_checks import needs_native

import prescore
from prescore import Exact, Hyper, KMeans, Leverage, Routed, Selected
from prescore.parallel.comm import NOTE
from prescore.parallel.ulysses import share_heads


def test_a_mesh_of_one_dimension_is_a_group(crew):
    *parts, sentences = zip(*crew.run(work.in_meshes, ranks=4), strict=True)
    wanted = prescore.exact_attention(*attention_tensors(n_keys=24), is_causal=True)
    for shards, expected in zip(parts, wanted, strict=True):
        torch.testing.assert_close(torch.cat(shards, dim=2), expected)
    assert set(sentences) == {"group must be a DeviceMesh of one dimension (take one by name: mesh['cp']), got 2"}


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "n_ranks"),
    [(8, 8, 2), (9, 3, 2), (6, 3, 4), (4, 1, 4), (4, 1, 3), (1, 1, 3), (32, 8, 16), (12, 4, 3)],
)
def test_every_query_head_goes_to_one_rank_with_its_kv_head(n_heads, n_kv_heads, n_ranks):
    shares = share_heads(n_heads, n_kv_heads, n_ranks)
    assert len(shares) == n_ranks
    assert [head for share in shares for head in share.heads] == list(range(n_heads))
    heads_per_kv = n_heads // n_kv_heads
    for share in shares:
        needed = {head // heads_per_kv for head in share.heads}
        assert needed == set(share.kv_heads)
        if len(needed) > 1:  # one call has one number of heads per KV head
            assert len(share.heads) == heads_per_kv * len(needed)
    if n_heads % n_ranks == 0 and (n_kv_heads % n_ranks == 0 or n_ranks % n_kv_heads == 0):
        assert {len(share.heads) for share in shares} == {n_heads // n_ranks}  # equal shares where they can be


LENGTH = 32768
SAMPLED = KMeans(fit_size=2080)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["default", "paper"])
def test_selected_sends_a_fifth_at_most_and_no_more_for_longer_sequences(crew, name, is_causal):
    config = Selected(top_k=2048) if name == "default" else Selected.paper(SAMPLED, top_k=2048)
    sent, shorter = (max(crew.run(work.bytes_sent, config, n, is_causal, ranks=4)) for n in (LENGTH, LENGTH // 2))
    # of an all-gather, which sends keys and values of 64 float32 to every other rank
    assert sent <= 3 * LENGTH // 4 * 2 * 64 * 4 / 5
    # how many of the selected keys a rank holds differs from text to text; hashes of queries are a byte each
    assert sent <= 1.1 * shorter


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "config",
    [
        Exact(), pytest.param(Routed(), marks=needs_native),
        Selected("kmeans", 128, min_seq_len=256), Selected("key-norm", 128, min_seq_len=192),
        Selected.paper(SAMPLED, top_k=128, min_seq_len=256), Selected(Leverage(), 64, min_seq_len=256), Hyper(),
    ],
    ids=["exact", "routed", "kmeans", "other clusters", "paper", "leverage", "hyper"],
)  # fmt: skip
def test_the_plan_counts_what_is_sent(crew, monkeypatch, config, is_causal):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent.parent / "experiments" / "parallel")
    planned = importlib.import_module("planned")
    wanted = planned.planned_bytes(planned.Layer(2048, 4, 1, 1, 64, torch.float32, is_causal), config)
    sent = crew.run(work.bytes_sent, config, 2048, is_causal, ranks=4)
    # the plan does not know where the selected keys lie
    spread = 0.1 * sum(wanted) / 4 if isinstance(config, Selected) else 0.0
    assert sent == pytest.approx(wanted, abs=spread)


SAME = "must be the same on all ranks of the group, got"
CASES = {
    "length": rf"query shape {SAME} \[1, 2, 12, 4\] on rank 0 and \[1, 2, 9, 4\] on rank 1",
    "configuration": rf'config {SAME} .*"top_k": 4.* on rank 0 and .*"top_k": 5.* on rank 1',
    "seed": rf"generator's seed {SAME} 5 on rank 0 and 6 on rank 1",
    "causality": rf"is_causal {SAME} True on rank 0 and False on rank 1",
    "mask": rf"key_padding_mask {SAME} none on rank 0 and a mask on rank 1",
    "hole": r"key_padding_mask must have no padding between the real keys .* got some at position 9 of sequence 0",
    "dtype": rf"dtype {SAME} torch.float32 on rank 0 and torch.float64 on rank 1",
    "gradients": rf"requires_grad {SAME} \[\] on rank 0 and \['key'\] on rank 1",
    "NaN": r"key must be finite where it is not padding, got nan at \(0, 0, 3, 0\)",
    "generator": "generator must be an int, one int for each sequence, a torch.Generator or None, got str 'six'",
    "type": "query must be a torch.Tensor, got str",
    "dropout": "group cannot run: dropout_p must be 0, as the ranks would drop other weights, got 0.1",
    "selection": "group cannot run: a selection cannot be given for a sequence that lies on several ranks",
}


@pytest.mark.parametrize("wrong", CASES)
def test_every_rank_refuses(crew, wrong):
    outcomes = crew.outcomes(work.attend_wrongly, wrong, ranks=2)
    assert [kind for kind, _ in outcomes] == ["raised", "raised"], outcomes
    for name, sentence in (result for _, result in outcomes):
        assert name in ("ValueError", "TypeError", "Unsupported")
        assert re.search(CASES[wrong], sentence), sentence
    if wrong == "NaN":  # the refusing rank is named on the others
        assert outcomes[0][1][1] == f"rank 1 of 2 refused: {outcomes[1][1][1]}"
    assert crew.run(work.attend_wrongly, "nothing", ranks=2)  # and the group goes on


@pytest.mark.parametrize(
    ("heads", "ranks", "sharded", "refusing"),
    [(1, 3, False, 2), (2, 2, False, 1), (2, 2, True, 0)],
    ids=["ranks without heads", "one rank's heads", "one rank's keys"],
)
def test_what_a_rank_refuses_while_it_computes(crew, heads, ranks, sharded, refusing):
    outcomes = crew.outcomes(work.refuse_while_computing, heads, sharded, ranks=ranks)
    assert [kind for kind, _ in outcomes] == ["raised"] * ranks, outcomes
    sentences = [sentence for _, (_, sentence) in outcomes]
    here = sentences.pop(refusing)
    assert here == "keys must be at most 100, got 200"
    assert sentences == [f"rank {refusing} of {ranks} refused: {here}"] * (ranks - 1)
    assert crew.run(work.attend_wrongly, "nothing", ranks=2)  # and the group goes on


def test_a_refused_call_does_not_advance_the_generator(crew):
    for sentence, unmoved in crew.run(work.generator_after_refusal, ranks=2):
        assert "is_causal" in sentence
        assert unmoved


def test_what_is_no_group():
    for group in ("all", 3, object()):
        with pytest.raises(TypeError, match=f"must be .* process group or DeviceMesh, got {type(group).__name__}"):
            prescore.prescored_attention(*attention_tensors(n_keys=4), group=group)


def test_a_note_that_is_too_long_is_refused_by_all(crew):
    for length in (100, 5000):
        outcomes = crew.outcomes(work.long_note, length, ranks=2)
        assert {kind for kind, _ in outcomes} == {"done" if length == 100 else "raised"}
    for _, (_, sentence) in outcomes:
        assert re.search(rf"a note must have {NOTE} bytes at most, got \d+", sentence)


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_a_rank_that_dies(tmp_path, in_backward):
    crew = Crew(tmp_path / "store", size=2, timeout=5)
    try:
        left, dead = crew.outcomes(work.die_or_attend, in_backward, ranks=2)
    finally:
        crew.stop()
    assert dead[0] == "dead"
    kind, (name, sentence) = left
    assert (kind, name) == ("raised", "RankLost")
    assert re.match("group must have 2 ranks that answer, got none from one of them on rank 0", sentence)
