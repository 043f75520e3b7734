"""Fields by name: what is changed, what is refused, what fits."""

import pytest

from prescore import Exact, Hyper, KMeans, Leverage, Lsh, Routed, Selected
from prescore.bench.language.methods import changed, check_overrides, field_names, fitting


@pytest.mark.parametrize("config", [Routed(), Selected(), Selected.early(), Hyper(), Exact()], ids=repr)
def test_every_name_is_a_field_that_can_be_set(config):
    values = config.to_dict()
    for name in field_names(config):
        owner = values
        for part in name.split("."):
            owner = owner[part]
        assert changed(config, {name: owner}) == config
    assert changed(config, {}) == config


def test_nested_fields_are_reached_by_their_path():
    config = changed(
        Selected.paper("kmeans", 64),
        {"top_k": 32, "scorer.n_clusters": 5, "inner.block_size": 16, "coupling.overlap": "count"},
    )
    assert (config.top_k, config.scorer, config.inner.block_size) == (32, KMeans(n_clusters=5), 16)
    assert config.inner.alignment == "rank"
    assert config.coupling.overlap == "count"
    assert changed(Hyper(), {"lsh.sample_size": 0}).lsh == Lsh(sample_size=0)


def test_a_word_names_the_type_of_a_part_and_an_object_is_taken_as_it_is():
    assert changed(Selected.paper("kmeans", 64), {"inner": "Exact"}).inner == Exact()
    # the part comes first, whatever the order
    made = changed(
        Selected(), {"inner.block_size": 8, "scorer.sketch_size": 9, "inner": "Lsh", "scorer": "leverage"}
    )
    assert (made.inner, made.scorer) == (Lsh(block_size=8), Leverage(sketch_size=9))
    assert changed(Selected(), {"inner": Lsh(4, 4)}).inner == Lsh(4, 4)
    with_clusters = Selected(remainder=KMeans(n_clusters=3))
    assert changed(with_clusters, {"remainder.n_clusters": 4}).remainder == KMeans(n_clusters=4)
    assert changed(with_clusters, {"remainder": "none"}).remainder == "none"
    with pytest.raises(ValueError, match=r"inner type must be one of .* got 'exact'"):
        changed(Selected(), {"inner": "exact"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("topk", r"^Selected must have fields among .* got 'topk' \(did you mean 'top_k'\?\)"),
        ("scorer.clusters", r"got 'scorer.clusters' \(did you mean 'scorer.n_clusters'\?\)"),
        ("inner.blocksize", r"got 'inner.blocksize' \(did you mean 'inner.block_size'\?\)"),
        ("rows", r"got 'rows'"),
        ("type", r"got 'type'"),
        ("scorer.name", r"got 'scorer.name'"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_one(name, message):
    with pytest.raises(ValueError, match=message):
        changed(Selected.paper("kmeans", 64), {name: 1})


def test_values_are_checked_as_ever():
    with pytest.raises(ValueError, match="sinks must be at least 0, got -1"):
        changed(Routed(), {"sinks": -1})
    with pytest.raises(TypeError, match="block_size must be an int, got str 'many'"):
        changed(Hyper(), {"lsh.block_size": "many"})


def test_only_what_fits_is_taken():
    overrides = {"sinks": 2, "rows": 8, "inner": "Exact", "inner.block_size": 4, "lsh.block_size": 3}
    assert fitting(Routed(), overrides) == {"sinks": 2, "rows": 8}
    assert fitting(Selected.paper(), overrides) == {"sinks": 2, "inner": "Exact"}
    assert fitting(Hyper(), overrides) == {"sinks": 2, "lsh.block_size": 3}
    assert fitting(Exact(), overrides) == {}


def test_an_override_that_nothing_has_is_refused():
    configs = [Routed(), Selected.paper()]
    check_overrides({"rows": 3, "inner.block_size": 4}, configs)
    with pytest.raises(ValueError, match=r"^Routed or Selected must have fields among .* got 'lsh.block_size'"):
        check_overrides({"lsh.block_size": 4}, configs)
    with pytest.raises(ValueError, match=r"got 'inner.block_size'"):
        check_overrides({"inner": "Exact", "inner.block_size": 4}, configs)
    with pytest.raises(ValueError, match="got 'sinks'"):
        check_overrides({"sinks": 4}, [])
