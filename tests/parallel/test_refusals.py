"""Wrong use is refused in one sentence on every rank; no rank waits for one that raised."""

import re

import pytest
from crew import Crew
from oracles.inputs import attention_tensors
from parallel_work import attend_wrongly, die_or_attend, generator_after_refusal, long_note, refuse_while_computing

import prescore
from prescore.parallel.comm import NOTE

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
    "generator": "generator must be an int, a torch.Generator or None, got str 'six'",
    "type": "query must be a torch.Tensor, got str",
    "dropout": "group cannot run: dropout_p must be 0, as the ranks would drop other weights, got 0.1",
    "selection": "group cannot run: a selection cannot be given for a sequence that lies on several ranks",
}


@pytest.mark.parametrize("wrong", CASES)
def test_every_rank_refuses(crew, wrong):
    outcomes = crew.outcomes(attend_wrongly, wrong, ranks=2)
    assert [kind for kind, _ in outcomes] == ["raised", "raised"], outcomes
    for name, sentence in (result for _, result in outcomes):
        assert name in ("ValueError", "TypeError", "Unsupported")
        assert re.search(CASES[wrong], sentence), sentence
    if wrong == "NaN":  # the refusing rank is named on the others
        assert outcomes[0][1][1] == f"rank 1 of 2 refused: {outcomes[1][1][1]}"
    assert crew.run(attend_wrongly, "nothing", ranks=2)  # and the group goes on


@pytest.mark.parametrize(
    ("heads", "ranks", "sharded", "refusing"),
    [(1, 3, False, 2), (2, 2, False, 1), (2, 2, True, 0)],
    ids=["ranks without heads", "one rank's heads", "one rank's keys"],
)
def test_what_a_rank_refuses_while_it_computes(crew, heads, ranks, sharded, refusing):
    outcomes = crew.outcomes(refuse_while_computing, heads, sharded, ranks=ranks)
    assert [kind for kind, _ in outcomes] == ["raised"] * ranks, outcomes
    sentences = [sentence for _, (_, sentence) in outcomes]
    here = sentences.pop(refusing)
    assert here == "keys must be at most 100, got 200"
    assert sentences == [f"rank {refusing} of {ranks} refused: {here}"] * (ranks - 1)
    assert crew.run(attend_wrongly, "nothing", ranks=2)  # and the group goes on


def test_a_refused_call_does_not_advance_the_generator(crew):
    for sentence, unmoved in crew.run(generator_after_refusal, ranks=2):
        assert "is_causal" in sentence
        assert unmoved


def test_what_is_no_group():
    for group in ("all", 3, object()):
        with pytest.raises(TypeError, match=f"must be .* process group or DeviceMesh, got {type(group).__name__}"):
            prescore.prescored_attention(*attention_tensors(n_keys=4), group=group)


def test_a_note_that_is_too_long_is_refused_by_all(crew):
    for length in (100, 5000):
        outcomes = crew.outcomes(long_note, length, ranks=2)
        assert {kind for kind, _ in outcomes} == {"done" if length == 100 else "raised"}
    for _, (_, sentence) in outcomes:
        assert re.search(rf"a note must have {NOTE} bytes at most, got \d+", sentence)


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_a_rank_that_dies(tmp_path, in_backward):
    crew = Crew(tmp_path / "store", size=2, timeout=5)
    try:
        left, dead = crew.outcomes(die_or_attend, in_backward, ranks=2)
    finally:
        crew.stop()
    assert dead[0] == "dead"
    kind, (name, sentence) = left
    assert (kind, name) == ("raised", "RankLost")
    assert re.match("group must have 2 ranks that answer, got none from one of them on rank 0", sentence)
