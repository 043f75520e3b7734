"""Which layers a pattern means."""

import pytest

from prescore import Exact, Hyper, Routed, Selected
from prescore.integrations.apply import configs_by_layer, pick_layers


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


def test_one_configuration_for_the_layers_asked_for():
    assert configs_by_layer(Hyper(), 3, "last:2") == {1: Hyper(), 2: Hyper()}
    assert configs_by_layer(None, 2) == {0: Routed(), 1: Routed()}


def test_configurations_by_layer():
    base, few = Selected(top_k=100), Selected(top_k=7)
    configs = configs_by_layer({"all": base, "first:2": few, 1: Exact(), 3: None, (4, -1): Hyper()}, 5)
    assert configs == {0: few, 1: Exact(), 2: base, 4: Hyper()}
    assert list(configs) == [0, 1, 2, 4]
    assert configs_by_layer({"last:1": base}, 5) == {4: base}
    assert configs_by_layer({3: None, "all": base}, 5, "odd") == {1: base, 3: base}


def test_wrong_configurations_are_named():
    with pytest.raises(TypeError, match=r"config\['all'\] must be .*got int"):
        configs_by_layer({"all": 3}, 2)
    with pytest.raises(TypeError, match=r"config\[1\] must be .*got dict"):
        configs_by_layer({1: {"top_k": 3}}, 2)
    with pytest.raises(TypeError, match=r"config must be .*got str"):
        configs_by_layer("routed", 2)
    with pytest.raises(ValueError, match=r"layers of config must be .*, got 'topk'"):
        configs_by_layer({"topk": Selected(top_k=3)}, 2)
