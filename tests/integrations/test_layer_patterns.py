"""Which layers a pattern means."""

import pytest

from prescore import PrescoreConfig
from prescore.integrations.layers import configs_by_layer, pick_layers


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (None, [0, 1, 2, 3, 4]),
        ("all", [0, 1, 2, 3, 4]),
        ("first:2", [0, 1]),
        ("last:2", [3, 4]),
        ("even", [0, 2, 4]),
        ("odd", [1, 3]),
        ([3, 1, -1, 1], [1, 3, 4]),
        (2, [2]),
        ([], []),
    ],
)
def test_patterns(pattern, expected):
    assert pick_layers(pattern, 5) == expected


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("middle", "got 'middle'"),
        ("first:", "got 'first:'"),
        ("last:0", "got 'last:0'"),
        ("first:9", "at most the model's 5 layers, got 'first:9'"),
        ([7], "between -5 and 4, got 7"),
    ],
)
def test_wrong_patterns_are_named(pattern, message):
    with pytest.raises(ValueError, match=message):
        pick_layers(pattern, 5)


@pytest.mark.parametrize("pattern", [1.5, ["a"], True])
def test_wrong_types_are_named(pattern):
    with pytest.raises(TypeError, match="layers must be"):
        pick_layers(pattern, 5)


def test_overrides_by_layer():
    base = PrescoreConfig(top_k=100)
    own = PrescoreConfig(method="uniform")
    configs = configs_by_layer({"all": {}, "first:2": {"top_k": 7}, 1: {"sinks": 9}, 3: None, 4: own}, base, 5)
    assert sorted(configs) == [0, 1, 2, 4]
    assert configs[0] == base.replace(top_k=7)
    assert configs[1] == base.replace(top_k=7, sinks=9)
    assert configs[2] == base
    assert configs[4] == own


def test_wrong_overrides_are_named():
    with pytest.raises(TypeError, match="got int"):
        configs_by_layer({"all": 3}, PrescoreConfig(), 2)
    with pytest.raises(ValueError, match="topk"):
        configs_by_layer({"all": {"topk": 3}}, PrescoreConfig(), 2)
