"""Records and their files: round trips, upgrades, damage, crashes, locks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prescore import config_from_dict
from prescore.bench.language import tables
from prescore.bench.records import (
    SCHEMA,
    Record,
    RecordFile,
    RecordFileError,
    Row,
    measure,
    read_records,
    row_key,
    upgrade,
    without_torn_end,
)

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"
COMMITTED = sorted(EXPERIMENTS.rglob("records*.jsonl"))


def make(value, seed=0):
    return measure("demo", Row({"value": value}, seed, lambda: {"double": 2 * value}))


def test_a_record_survives_the_round_trip():
    record = make(3)
    assert Record.from_json(record.to_json()) == record
    assert json.loads(record.to_json())["schema"] == SCHEMA
    assert record.results == {"double": 6}
    assert record.versions["prescore"]
    odd = measure("demo", Row({}, None, lambda: {"worst": float("inf"), "share": [float("nan"), 1.0]}))
    assert json.loads(odd.to_json())["results"] == {"worst": "inf", "share": ["nan", 1.0]}
    with pytest.raises(TypeError, match="record must hold plain JSON values"):
        measure("demo", Row({}, 0, lambda: {"what": object()})).to_json()


def test_the_key_depends_on_settings_not_on_their_order():
    assert row_key("a", {"n": 1, "d": 2}, 0) == row_key("a", {"d": 2, "n": 1}, 0)
    others = [
        row_key(*row) for row in (("a", {"n": 1}, 0), ("b", {"n": 1}, 0), ("a", {"n": 2}, 0), ("a", {"n": 1}, 1))
    ]
    assert len(set(others)) == 4


def schema_1(command, config, figures):
    key = row_key(command, config, 0)
    return {"command": command, "key": key, "config": config, "seed": 0, "figures": figures, "seconds": 1.0}


OLD_ROUTED = {"type": "Routed", "rows": 512, "leaf_size": 128, "chunk_size": 256}


def test_records_of_schema_1_are_upgraded():
    scorer = {"name": "kmeans", "fit_size": None}
    coupling = {"type": "Coupling", "mask": "zero"}
    selected = {"type": "Selected", "scorer": scorer, "top_k": 64, "inner": {"type": "Lsh"}, "coupling": coupling}
    method = {"label": "kmeans, top 64", "kind": "prescored", "settings": selected, "axes": {"blockwise": True}}
    old = schema_1("perplexity", {"n_tokens": 4096, "method": method}, {"rows_per_query": 3.0, "loss": 1.0})
    new = Record.from_json(json.dumps(old))
    assert new.key == row_key("perplexity", new.config, 0) != old["key"]
    assert new.results == {"reads_per_query": 3.0, "loss": 1.0}
    own = new.config["method"]
    assert (own["label"], own["axes"]) == ("paper:kmeans, top 64", {"leaf_inclusive": True})
    assert own["config"]["scorer"]["fit_size"] == "auto"
    assert own["config"]["coupling"]["blocks"] == "selected"
    assert own["config"]["min_score"] is None
    assert Record.from_json(new.to_json()) == new


@pytest.mark.parametrize(
    ("method", "config"),
    [
        ({"kind": "exact", "settings": {}}, {"type": "Exact"}),
        (
            {"kind": "local", "settings": {"leaf": 8}},
            {"type": "Local", "chunk_size": 8, "previous_chunk": False, "sinks": 0},
        ),
        (
            {"kind": "local", "settings": {"leaf": 8, "before": 8, "sinks": 2}},
            {"type": "Local", "chunk_size": 8, "previous_chunk": True, "sinks": 2},
        ),
        ({"kind": "baseline", "settings": {"name": "oracle"}}, {"type": "Baseline", "name": "oracle"}),
        (
            {"kind": "prescored", "settings": OLD_ROUTED},
            {"type": "Routed", "min_weight": 1 / 1024, "cluster_size": 128, "chunk_size": 256},
        ),
        (
            {"kind": "prescored", "settings": {**OLD_ROUTED, "rows": 0}},
            {"type": "Routed", "min_weight": 1.0, "cluster_size": 128, "chunk_size": 256},
        ),
    ],
)
def test_methods_of_schema_1_become_configurations(method, config):
    old = schema_1("perplexity", {"method": {"label": "default, rows=8", **method, "axes": {}}}, {"loss": 1.0})
    own = upgrade(old)["config"]["method"]
    assert own["config"] == config
    assert own["label"] == "default, min_weight=1/16"


@pytest.mark.parametrize(
    ("command", "config", "figures", "new_config", "results"),
    [
        (
            "speed",
            {"study": "parts", "key_heads": 2},
            {"parts": {"stand-ins": {"of_limit": 1}, "rows": {"of_limit": 2}}, "rows_off": 0.0},
            {"study": "parts", "kv_heads": 2},
            {
                "parts": {"centroids": {"of_exact_rate": 1}, "keys": {"of_exact_rate": 2}},
                "mismatched_queries": 0.0,
            },
        ),
        (
            "speed",
            {"study": "lengths", "methods": ["hyper", "kmeans"]},
            {"methods": {"kmeans": {"limit": 2.0, "limit_share": 0.5}}},
            {"study": "lengths", "methods": ["hyper", "paper:kmeans"]},
            {"methods": {"paper:kmeans": {"speedup_bound": 2.0, "share_of_bound": 0.5}}},
        ),
        (
            "speed",
            {"study": "parallel"},
            {"ways": {"paper": {"way": "rows", "flipped_rows": 0.0}}},
            {"study": "parallel"},
            {"methods": {"paper": {"exchange": "selected", "mismatched_queries": 0.0}}},
        ),
        ("speed", {"study": "steps"}, {"rows": 9.0}, {"study": "steps"}, {"reads_per_query": 9.0}),
        (
            "vision",
            {"rows": 32, "clusters": 4, "share": 0.5, "protect": True, "config": {"scorer": {"fit_size": None}}},
            {"n_tokens": 197},
            {
                **{"budget": 32, "n_clusters": 4, "centroid_share": 0.5, "keep_prefix": True},
                "config": {"scorer": {"fit_size": None}},  # the sample held all 197 keys
            },
            {"n_tokens": 197},
        ),
        ("planted", {"fit_size": 0}, {"recall": 1}, {"fit_size": None}, {"recall": 1}),
    ],
)
def test_names_of_schema_1(command, config, figures, new_config, results):
    new = upgrade(schema_1(command, config, figures))
    assert (new["config"], new["results"]) == (new_config, results)


def test_records_of_a_newer_schema_are_refused(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(make(1).to_json().replace('"schema": 2', '"schema": 3') + "\n")
    with pytest.raises(RecordFileError, match=r"record must have schema 2 or older, got 3 of another version"):
        read_records(path)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: str(path.relative_to(EXPERIMENTS)))
def test_committed_records_are_of_today_and_make_tables(path, tmp_path):
    content = path.read_text()
    assert all(json.loads(line)["schema"] == SCHEMA for line in content.splitlines())
    records = read_records(path)
    assert "".join(record.to_json() + "\n" for record in records) == content
    assert not [word for record in records for word in record.argv if word.startswith("/")]
    for record in records:
        method = record.config.get("method")
        config = record.config.get("config") or (method["config"] if isinstance(method, dict) else {})
        is_sampled = config.get("scorer", {}).get("fit_size") == "auto"
        if config.get("type") in ("Routed", "Selected", "Hyper") and not is_sampled:
            assert config_from_dict(config).to_dict() == config
    commands = {record.command for record in records}
    if commands == {"perplexity"}:
        summaries, experiment = tables.summarise(records), records[0].config["experiment"]
        assert len(tables.loss_table(summaries, "title").rows) == len(summaries) > 0
        assert tables.full_csv(summaries)
        assert (experiment == "default") == bool(tables.held_out_tables(records))
        tables.paper_csv(summaries)
        tables.plot_experiment(experiment, summaries, tmp_path / "picture.png", "title")
    if commands == {"retrieval"}:
        assert tables.retrieval_table(records).rows


def test_append_and_resume(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    first = RecordFile(path)
    first.append(make(1))
    first.append(make(2))
    with pytest.raises(ValueError, match="key must be new"):
        first.append(make(1))
    first.close()
    before = path.read_bytes()
    refusal = r"must be new or empty, got 2 records in it; continue it with --resume"
    with pytest.raises(RecordFileError, match=refusal):
        RecordFile(path)
    assert path.read_bytes() == before
    again = RecordFile(path, resume=True)
    assert make(1).key in again
    assert make(3).key not in again
    again.append(make(3))
    assert [record.config["value"] for record in read_records(path)] == [1, 2, 3]
    assert again[make(2).key].results == {"double": 4}
    assert len(again) == len(list(again)) == 3
    (tmp_path / "empty.jsonl").touch()
    assert len(RecordFile(tmp_path / "empty.jsonl")) == 0


LINE = make(2).to_json().encode() + b"\n"
DAMAGED = {
    "no json": b"not json\n",
    "no object": b"[1, 2]\n",
    "fields missing": b'{"schema": 2, "command": "demo"}\n',
    "no text": b"\xff\xfe\n",
    "no results": LINE.replace(b'{"double": 4}', b"null"),
    "empty results": LINE.replace(b'{"double": 4}', b"{}"),
    "zeros inside": LINE[:40] + b"\0" + LINE[40:] + LINE,
    "another key": LINE.replace(b"demo-", b"demo-0"),
    "torn by someone else": b"some notes without a newline",
    "half of no text": b"\xff\xfe",
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("resume", [True, False])
def test_a_damaged_file_is_refused_by_line_and_not_changed(tmp_path, name, resume):
    path = tmp_path / "records.jsonl"
    RecordFile(path).append(make(1))
    with path.open("ab") as file:
        file.write(DAMAGED[name])
    before = path.read_bytes()
    with pytest.raises(RecordFileError, match=r"got a damaged line 2 .*the file was not changed") as caught:
        RecordFile(path, resume=resume)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


FOREIGN = {
    "text": b"notes of someone else",
    "two lines": b"notes\nof someone else",
    "zeros": bytes(4096),
    "zeros and text": bytes(100) + b"text",
    "text and zeros": b"text\n" + bytes(100),
    "another json": b'{"command": 3}',
    "binary": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0",
}


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_is_not_ours_is_never_changed(tmp_path, name, resume):
    path = tmp_path / "records.jsonl"
    path.write_bytes(FOREIGN[name])
    with pytest.raises(RecordFileError, match="the file was not changed"):
        RecordFile(path, resume=resume)
    assert path.read_bytes() == FOREIGN[name]


TORN = {
    "cut off": LINE[:40],
    "cut off by one": LINE[:-2],
    "one byte": LINE[:1],
    "half zeros": LINE[:100] + bytes(4096),
    "old schema": b'{"command": "dem',
    "zeros": bytes(len(LINE)),
    "zeros and a newline": bytes(len(LINE) - 1) + b"\n",
    "zeros first": bytes(100) + LINE[100:],
}


# zeros alone may be anything, and are refused above
@pytest.mark.parametrize(
    ("name", "n_whole"), [(name, n) for name in TORN for n in (0, 1, 3) if n or not name.startswith("zeros")]
)
def test_a_torn_end_is_dropped_and_said(tmp_path, name, n_whole):
    path = tmp_path / "records.jsonl"
    whole = b"".join(make(10 + value).to_json().encode() + b"\n" for value in range(n_whole))
    path.write_bytes(whole + TORN[name])
    for read in (RecordFile, read_records):
        with pytest.raises(RecordFileError, match=rf"damaged line {n_whole + 1} .*--resume"):
            read(path)
    assert path.read_bytes() == whole + TORN[name]
    file = RecordFile(path, resume=True)
    size = len(TORN[name])
    assert file.dropped == f"dropped one unfinished row at the end of {path} ({size} bytes); it is measured again"
    assert path.read_bytes() == whole == without_torn_end(whole + TORN[name])
    file.append(make(2))
    assert len(read_records(path)) == n_whole + 1


def test_whole_lines_stay(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(LINE + bytes(512))  # zeros behind a whole line go
    assert make(2).key in RecordFile(path, resume=True)
    assert path.read_bytes() == LINE
    path.write_bytes(
        LINE + b"\n" + make(3).to_json().encode()
    )  # no last newline: two records must not share a line
    file = RecordFile(path, resume=True)
    assert file.dropped is None
    file.append(make(4))
    assert len(read_records(path)) == 3
    path.write_bytes(LINE + LINE)
    with pytest.raises(RecordFileError, match=r"damaged line 2 .*already on line 1"):
        read_records(path)


HOLD = (
    "import sys; from prescore.bench.records import RecordFile\n"
    "file = RecordFile(sys.argv[1], resume=True); print('held', flush=True); sys.stdin.read()"
)


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path):
    path = tmp_path / "records.jsonl"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RecordFileError, match="must not be in use, got another run that writes to it"):
            RecordFile(path, resume=True)
        holder.kill()
    file = RecordFile(path, resume=True)
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "must not be in use" in done.stderr
    file.close()
    file.close()
    assert subprocess.run(command, input="", capture_output=True, text=True, check=True).stdout == "held\n"


def test_opening_again_in_one_process_takes_the_file_over(tmp_path):
    path = tmp_path / "records.jsonl"
    first = RecordFile(path)
    first.append(make(1))
    second = RecordFile(tmp_path / "." / "records.jsonl", resume=True)
    with pytest.raises(RecordFileError, match="must be open, got a record after it was closed or opened again"):
        first.append(make(2))
    second.append(make(2))
    assert len(read_records(path)) == 2


def test_only_regular_files_of_the_folder_hold_records(tmp_path):
    outside = tmp_path / "outside.jsonl"
    outside.write_bytes(LINE)
    folder = tmp_path / "run"
    (folder / "folder").mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    (folder / "device").symlink_to("/dev/null")
    (folder / "link").symlink_to(outside)
    (folder / "dangling").symlink_to(tmp_path / "nothing")
    (folder / "file").touch()
    for name, refusal in {
        "folder": "must be a regular file, got something else of that name",
        "pipe": "must be a regular file, got something else of that name",
        "device": "must lie in its own directory, got a symbolic link to /dev/null",
        "link": f"must lie in its own directory, got a symbolic link to {outside}",
        "dangling": "must lie in its own directory",
        "file/records.jsonl": "must lie in a directory, got",
        "file/deeper/records.jsonl": "must lie in a directory, got",
    }.items():
        with pytest.raises(RecordFileError, match=refusal):
            RecordFile(folder / name, resume=True)
    assert outside.read_bytes() == LINE
    assert not (tmp_path / "nothing").exists()


FILL = """
import resource, signal, sys
from prescore.bench.records import RecordFile, Row, measure
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = RecordFile(sys.argv[1], resume=True)
make = lambda value: measure("demo", Row({"value": value}, 0, lambda: {"double": 2 * value}))
file.append(make(1))
size = file.path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, size + 50))
try:
    file.append(make(2))
except OSError as error:
    print(error)
"""


def test_a_full_disk_leaves_whole_records(tmp_path):
    path = tmp_path / "records.jsonl"
    done = subprocess.run([sys.executable, "-c", FILL, str(path)], capture_output=True, text=True, check=True)
    assert "must take one more record, got [Errno" in done.stdout
    assert "make room and continue with --resume" in done.stdout
    assert [record.config["value"] for record in read_records(path)] == [1]
    file = RecordFile(path, resume=True)
    assert file.dropped is None
    file.append(make(2))
    assert len(read_records(path)) == 2


def test_records_need_no_torch():
    code = "import sys, prescore.bench.records; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
