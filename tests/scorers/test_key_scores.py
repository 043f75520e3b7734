"""Key norm, key difference and the random baseline, each against its formula."""

import torch

from prescore.rng import Streams
from prescore.scoring.base import as_scorer
from prescore.scoring.key_diff import KeyDiff
from prescore.scoring.key_norm import KeyNorm
from prescore.scoring.kmeans import Minkowski
from prescore.scoring.select import score_keys
from prescore.scoring.uniform import Uniform


def _keys():
    return torch.randn(2, 3, 20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_key_norm_is_the_length():
    keys = _keys()
    scores = KeyNorm().score(keys, valid=None, streams=Streams(0))
    torch.testing.assert_close(scores, keys.square().sum(-1).sqrt())


def test_key_diff_is_minus_the_cosine_to_the_mean_of_normalised_keys():
    keys = _keys()
    unit = torch.nn.functional.normalize(keys, dim=-1)
    expected = -torch.cosine_similarity(keys, unit.mean(2, keepdim=True), dim=-1)
    torch.testing.assert_close(KeyDiff().score(keys, valid=None, streams=Streams(0)), expected)


def test_key_diff_prefers_the_odd_one_out():
    keys = torch.tensor([[1.0, 0.1], [1.0, -0.1], [1.0, 0.0], [-1.0, 0.2]])[None, None]
    assert KeyDiff().score(keys, valid=None, streams=Streams(0)).argmax() == 3
    assert (KeyDiff().score(torch.zeros(1, 1, 3, 2), valid=None, streams=Streams(0)) == 0).all()


def test_uniform_depends_on_position_and_seed_only():
    scores = Uniform().score(_keys(), valid=None, streams=Streams(0))
    assert (scores == scores[:1, :1]).all()
    assert (scores >= 0).all()
    assert (scores < 1).all()
    assert not torch.equal(scores, Uniform().score(_keys(), valid=None, streams=Streams(1)))


def test_minkowski_meets_its_named_relatives():
    keys = _keys()
    for p, name in ((2.0, "kmeans"), (1.0, "kmedian")):
        named = score_keys(keys, as_scorer(name), valid=None, streams=Streams(0))
        general = score_keys(keys, Minkowski(p=p), valid=None, streams=Streams(0))
        assert torch.equal(general.scores, named.scores)
