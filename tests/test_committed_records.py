"""Records that the docs quote can be read, are named by their settings, and hold configurations of today.

Version 1 had one flat configuration; `experiments/convert_v1.py` turned its records into those of version 2.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from prescore import Coupling, Exact, Hyper, KMeans, Leverage, Lsh, Minkowski, Routed, Selected, config_from_dict
from prescore.records import Record, read_records, row_key

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "experiments").rglob("records*.jsonl"))

_spec = importlib.util.spec_from_file_location("convert_v1", ROOT / "experiments" / "convert_v1.py")
convert_v1 = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(convert_v1)

V1 = {
    "method": "key-diff",
    "top_k": None,
    "rule": "nearest",
    "n_clusters": None,
    "max_iter": 10,
    "normalize": None,
    "noise": 0.0,
    "p": 2.0,
    "sketch_size": None,
    "seeding": "k-means++",
    "fit_size": None,
    "selector": "top",
    "sinks": 4,
    "recent": 0,
    "min_fraction": 0.0,
    "inner": "routed",
    "block_size": 256,
    "sample_size": 256,
    "n_projections": 7,
    "alignment": "hash",
    "min_seq_len": 4096,
    "leaf_inclusive": False,
    "remainder": "centroids",
    "coupling": {"mask": "exclude", "residual_weight": "selected", "overlap": "exclude"},
    "rows": 512,
    "leaf_size": 128,
    "chunk_size": 512,
    "tolerance": None,
    "refresh_every": None,
    "on_unsupported": "raise",
}
PAPER = {
    **V1,
    **{"method": "kmeans", "top_k": 64, "normalize": True, "sinks": 0, "inner": "hyper", "alignment": "rank"},
    **{"remainder": "none", "min_seq_len": 512},
}
KEPT = {**V1, "top_k": 64, "inner": "exact", "sinks": 0, "remainder": "none"}
EARLY = {"mask": "zero", "residual_weight": "all", "overlap": "count"}
HASHED, RANKED = Lsh(), Lsh(alignment="rank")


def configurations(record):
    """The configurations inside a record's settings."""
    found = [record.config[name] for name in ("config",) if name in record.config]
    method = record.config.get("method")
    return found + ([method["settings"]] if isinstance(method, dict) and method["kind"] == "prescored" else [])


def v1_record(command, config, figures=None, seed=0):
    figures = figures or {"n_tokens": 197, "top1": 50.0}
    return Record(command, row_key(command, config, seed), config, seed, figures, 1.5, argv=["prescore", command])


def language_row(settings, **changes):
    method = {"label": "a label", "kind": "prescored", "settings": settings, "axes": {"top_k": 0}}
    return {"part": "loss", "document": "a book", "n_tokens": 4096, "method": {**method, **changes}}


def test_there_are_some():
    assert len(FILES) > 10


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_committed_records_are_whole(path):
    records = read_records(path)
    assert records
    words = [word for record in records for word in record.argv]
    assert not [word for word in words if word.startswith("/")], "no address of a machine"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_committed_configurations_are_those_of_today(path):
    for record in read_records(path):
        for settings in configurations(record):
            # a field that is new, gone or renamed would make every planned row another one
            assert config_from_dict(settings).to_dict() == settings


def test_committed_files_are_left_alone_by_the_converter():
    for path in FILES:
        assert convert_v1.converted_file(path) == path.read_text()


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        (V1, Routed()),
        (
            {**V1, "min_seq_len": 128, "rows": 8, "leaf_size": 8, "chunk_size": 128},
            Routed(rows=8, leaf_size=8, chunk_size=128, exact_until=128),
        ),
        ({**V1, "tolerance": 0.1, "top_k": 1.0, "recent": 4}, Routed(tolerance=0.1)),
        ({**V1, "top_k": 512}, Routed()),
        ({**V1, "top_k": 511}, Selected("key-diff", 511)),
        ({**V1, "recent": 513}, Exact()),
        ({**KEPT, "top_k": 0}, Exact()),
        (KEPT, Selected("key-diff", 64, sinks=0, remainder="none")),
        (
            {**KEPT, "block_size": 7, "leaf_inclusive": True, "coupling": EARLY},
            Selected("key-diff", 64, sinks=0, remainder="none", coupling=Coupling(mask="zero")),
        ),
        (
            {**KEPT, "method": "leverage", "sketch_size": 9, "n_clusters": 5, "min_seq_len": 128},
            Selected(Leverage(sketch_size=9), 64, sinks=0, remainder="none", min_seq_len=128),
        ),
        (
            {**KEPT, "method": "minkowski", "p": 3.0, "selector": "sample", "rule": "farthest", "fit_size": 0},
            Selected(Minkowski(p=3.0, rule="farthest", fit_size=0), 64, "sample", sinks=0, remainder="none"),
        ),
        ({**KEPT, "remainder": "centroids"}, Selected("key-diff", 64, sinks=0)),
        (
            {**KEPT, "remainder": "centroids", "n_clusters": 16, "normalize": False},
            Selected("key-diff", 64, sinks=0, remainder=KMeans(n_clusters=16, normalize=False)),
        ),
        (
            {**KEPT, "method": "kmeans", "remainder": "centroids", "n_clusters": 16, "normalize": False},
            Selected(KMeans(n_clusters=16, normalize=False), 64, sinks=0),
        ),
        (PAPER, Selected.paper("kmeans", 64, min_seq_len=512)),
        (
            {**PAPER, "coupling": EARLY, "min_fraction": 0.2},
            Selected.early("kmeans", 64, min_seq_len=512, min_fraction=0.2),
        ),
        (
            {**PAPER, "top_k": 0, "leaf_inclusive": True, "sinks": 4, "block_size": 32, "sample_size": 0},
            Hyper(Lsh(32, 0, 7, "rank"), sinks=4, min_seq_len=512, leaf_inclusive=True),
        ),
        ({**PAPER, "top_k": None, "alignment": "hash"}, Hyper(HASHED, min_seq_len=512)),
        ({**PAPER, "top_k": 0, "coupling": EARLY}, Selected.early("kmeans", 1.0, min_seq_len=512)),
        (
            {**PAPER, "top_k": 0, "coupling": EARLY, "sinks": 4},
            Selected.early(
                "kmeans",
                1.0,
                min_seq_len=512,
                sinks=4,
                coupling=Coupling(residual_weight="all", overlap="count"),
            ),
        ),
        ({**PAPER, "top_k": 0, "recent": 3}, Selected.paper("kmeans", 1.0, min_seq_len=512, recent=3)),
    ],
)
def test_a_flat_configuration_becomes_what_it_did(settings, config):
    assert convert_v1.config_from_v1(settings, n_keys=4096, is_causal=True) == config


def test_what_did_nothing_without_a_causal_mask():
    """Causal leaves; and a call of as many queries as `min_seq_len` was exact with `leaf_inclusive`."""
    short = {**KEPT, "min_seq_len": 1024}
    assert convert_v1.config_from_v1(short, n_keys=197, is_causal=False).min_seq_len == Selected().min_seq_len
    inclusive = {**V1, "leaf_inclusive": True}
    assert convert_v1.config_from_v1(inclusive, n_keys=197, is_causal=False) == Routed(exact_until=4097)
    assert convert_v1.config_from_v1(inclusive, n_keys=197, is_causal=True) == Routed()
    assert convert_v1.config_from_v1({**V1, "top_k": 196}, n_keys=197, is_causal=False) == Selected(
        "key-diff", 196
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inner": "auto"}, "inner must be hyper, exact or routed, got 'auto'"),
        ({"refresh_every": 64}, "refresh_every must be None, .* got 64"),
        ({"on_unsupported": "exact"}, "on_unsupported must be 'raise', .* got 'exact'"),
        ({"inner": "hyper", "tolerance": 0.1}, "tolerance must be None where nothing is routed, got 0.1"),
        ({"top_k": 64, "inner": "exact", "min_fraction": 0.5}, "min_fraction must be 0 .* got 0.5"),
        ({"top_k": 64, "inner": "exact", "normalize": True}, "normalize must be off for key-diff, got True"),
        ({"top_k": 64, "inner": "exact", "noise": 0.5}, "noise must be off for key-diff, got 0.5"),
        ({"top_k": 64, "inner": "exact", "method": "magic"}, "scorer must be one of .* got 'magic'"),
        ({"top_k": 64, "inner": "exact", "remainder": "some"}, "remainder must be .* got 'some'"),
        ({"temperature": 2.0}, "fields of version 1, got temperature"),
        ({"inner": "hyper", "block_size": 0, "sample_size": 0}, "got 0 and 0"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(changes, said):
    with pytest.raises(ValueError, match=said):
        convert_v1.config_from_v1({**V1, **changes}, n_keys=4096, is_causal=True)


@pytest.mark.parametrize(
    ("record", "config"),
    [
        (
            v1_record("vision", {"method": "kmeans", "rows": 64, "config": {**KEPT, "min_seq_len": 1024}}),
            Selected("key-diff", 64, sinks=0, remainder="none"),
        ),
        (
            v1_record("coverage", {"method": "key-diff", "config": KEPT}, {"n_keys": 197}),
            Selected("key-diff", 64, sinks=0, remainder="none"),
        ),
        (
            v1_record("perplexity", language_row(PAPER), {"loss": 3.0}),
            Selected.paper("kmeans", 64, min_seq_len=512),
        ),
        (v1_record("retrieval", language_row(V1), {"score": 1.0}), Routed()),
        (v1_record("vision", {"method": "exact", "rows": 197}), None),
        (v1_record("perplexity", language_row({"leaf": 512}, kind="local"), {"loss": 3.0}), None),
        (v1_record("perplexity", language_row({"name": "oracle"}, kind="baseline"), {"loss": 3.0}), None),
        (v1_record("speed", {"n": 8192, "top_k": 2048, "min_seq_len": 2048}, {"methods": {}}), None),
        (v1_record("planted", {"part": "recall", "method": "kmeans"}, {"recall": {}}), None),
    ],
)
def test_a_record_keeps_everything_but_its_settings(record, config):
    new = convert_v1.converted(record)
    assert configurations(new) == ([] if config is None else [config.to_dict()])
    # named by its new settings, as a freshly planned row is
    assert Record.from_json(new.to_json()) == new
    assert (new.key == record.key) == (config is None)
    for name in ("command", "seed", "figures", "seconds", "argv"):
        assert getattr(new, name) == getattr(record, name)
    assert convert_v1.converted(new) == new


def test_files_are_converted_all_or_none(tmp_path, capsys):
    good, bad = tmp_path / "good" / "records.jsonl", tmp_path / "records.jsonl"
    good.parent.mkdir()
    record = v1_record("vision", {"method": "kmeans", "rows": 64, "config": KEPT})
    good.write_text(record.to_json() + "\n")
    odd = v1_record("vision", {"method": "kmeans", "rows": 64, "config": {**KEPT, "inner": "auto"}})
    bad.write_text(record.to_json() + "\n" + odd.to_json() + "\n")
    before = good.read_text(), bad.read_text()
    assert convert_v1.main([str(tmp_path)]) == 2
    assert "record 2: inner must be hyper, exact or routed, got 'auto'" in capsys.readouterr().err
    assert (good.read_text(), bad.read_text()) == before
    bad.write_text(record.to_json() + "\n")
    assert convert_v1.main([str(tmp_path)]) == 0
    for path in (good, bad):
        (new,) = read_records(path)
        assert config_from_dict(new.config["config"]) == Selected("key-diff", 64, sinks=0, remainder="none")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["records.jsonl"]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (v1_record("magic", {"n": 1}), "command must be one that wrote records in version 1, got 'magic'"),
        (
            v1_record("vision", {"method": "kmeans", "config": {"top_k": 3}}),
            "of version 1, got alignment, ",
        ),
        (v1_record("perplexity", {"document": "a book"}, {"loss": 3.0}), "'method'"),
    ],
)
def test_junk_is_refused(record, said, tmp_path):
    (tmp_path / "records.jsonl").write_text(record.to_json() + "\n")
    with pytest.raises(convert_v1.CannotTranslate, match=f"record 1: .*{said}"):
        convert_v1.converted_file(tmp_path / "records.jsonl")


def test_two_rows_that_mean_the_same_are_refused(tmp_path):
    rows = [{"method": "kmeans", "config": {**KEPT, "min_seq_len": n}} for n in (1024, 4096)]
    (tmp_path / "records.jsonl").write_text("".join(v1_record("vision", row).to_json() + "\n" for row in rows))
    with pytest.raises(convert_v1.CannotTranslate, match="record 2: another record means the same row"):
        convert_v1.converted_file(tmp_path / "records.jsonl")


def test_json_of_version_1_is_what_the_samples_say():
    """The samples above are as the flat configuration wrote itself: nothing but JSON values."""
    assert json.loads(json.dumps(V1)) == V1
    assert set(V1) == convert_v1.V1_FIELDS
