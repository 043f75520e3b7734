"""Records and their files: round trips, damage, crashes, locks."""

import json
import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from prescore import config_from_dict
from prescore.bench.language import tables
from prescore.bench.language.answers import retrieval_table
from prescore.bench.language.held_out import held_out_tables
from prescore.bench.records import (
    SCHEMA,
    Record,
    RecordFile,
    RecordFileError,
    Row,
    measure,
    read_records,
    replacing,
    row_key,
)
from prescore.paper.tables import paper_csv, plot_experiment

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"


def make(value, seed=0):
    return measure("demo", Row({"value": value}, seed, lambda: {"double": 2 * value}))


def test_a_record_survives_the_round_trip():
    record = make(3)
    assert Record.from_json(record.to_json()) == record
    assert json.loads(record.to_json())["schema"] == SCHEMA
    assert record.results == {"double": 6}
    assert record.versions["prescore"]
    in_clone = (EXPERIMENTS.parent / ".git").exists()
    assert bool(re.fullmatch(r"[0-9a-f]{7,}\+?", record.versions.get("commit", ""))) == in_clone
    # numbers that JSON lacks come back as numbers, words and objects that look like them as they were
    results = {"worst": [math.inf, -math.inf, 1.0], "answer": "inf", "versions": {"float": "1.0"}}
    odd = measure("demo", Row({}, None, lambda: {**results, "share": math.nan}))
    found = Record.from_json(odd.to_json()).results
    assert math.isnan(found.pop("share"))
    assert found == results
    with pytest.raises(TypeError, match="record must hold plain JSON values"):
        measure("demo", Row({}, 0, lambda: {"what": object()})).to_json()


def test_the_key_depends_on_settings_not_on_their_order():
    assert row_key("a", {"n": 1, "d": 2}, 0) == row_key("a", {"d": 2, "n": 1}, 0)
    rows = ("a", {"n": 1}, 0), ("b", {"n": 1}, 0), ("a", {"n": 2}, 0), ("a", {"n": 1}, 1)
    assert len({row_key(*row) for row in rows}) == 4


def test_committed_records_are_of_today_and_make_tables(tmp_path):
    paths = sorted(EXPERIMENTS.rglob("records*.jsonl"))
    assert paths
    for path in paths:
        records = read_records(path)
        assert "".join(record.to_json() + "\n" for record in records) == path.read_text(), path
        assert not [word for record in records for word in record.argv if word.startswith("/")], path
        for record in records:
            method = record.config.get("method")
            config = record.config.get("config") or (method["config"] if isinstance(method, dict) else {})
            is_old = config.get("scorer", {}).get("fit_size") == "auto"  # no configuration of today has it
            if config.get("type") in ("Routed", "Selected", "Hyper") and not is_old:
                assert config_from_dict(config).to_dict() == config, path
        commands = {record.command for record in records}
        if commands == {"perplexity"}:
            summaries, experiment = tables.summarise(records), records[0].config["experiment"]
            assert len(tables.loss_table(summaries, "title").rows) == len(summaries) > 0
            assert tables.full_csv(summaries)
            assert (experiment == "default") == bool(held_out_tables(records))
            paper_csv(summaries)
            plot_experiment(experiment, summaries, tmp_path / "picture.png", "title")
        if commands == {"retrieval"}:
            assert retrieval_table(records).rows


def test_append_and_resume(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    first = RecordFile(path)
    first.append(make(1))
    first.append(make(2))
    with pytest.raises(ValueError, match="key must be new"):
        first.append(make(1))
    first.close()
    with pytest.raises(RecordFileError, match="new or empty, got 2 records in it; continue it with --resume"):
        RecordFile(path)
    again = RecordFile(path, resume=True)
    assert [make(value).key in again for value in (1, 2, 3)] == [True, True, False]
    again.append(make(3))
    assert [record.config["value"] for record in read_records(path)] == [1, 2, 3]
    assert again[make(2).key].results == {"double": 4}
    assert len(again) == len(list(again)) == 3
    moved = path.rename(tmp_path / "moved")
    for change in (path.touch, lambda: (moved.replace(path), again.close()), path.unlink):  # another file, closed
        with pytest.raises(RecordFileError, match="must be open, got a record after it was closed, moved or del"):
            again.append(make(4))
        change()
    (tmp_path / "empty.jsonl").touch()
    assert len(RecordFile(tmp_path / "empty.jsonl")) == 0


LINE = make(2).to_json().encode() + b"\n"
DAMAGED = {
    "no json": b"not json\n",
    "no object": b"[1, 2]\n",
    "fields missing": b'{"schema": 3, "command": "demo"}\n',
    "no text": b"\xff\xfe\n",
    "an old schema": LINE.replace(b'"schema": 3', b'"schema": 1'),
    "no results": LINE.replace(b'{"double": 4}', b"null"),
    "empty results": LINE.replace(b'{"double": 4}', b"{}"),
    "another key": LINE.replace(b"demo-", b"demo-0"),
    "a number that JSON lacks": LINE.replace(b'{"double": 4}', b'{"double": NaN}'),
    "a name twice": LINE.replace(b'{"double": 4}', b'{"double": 4, "double": 5}'),
    "seconds in words": re.sub(rb'"seconds": [^,]+', b'"seconds": "<b>"', LINE),
    "arguments of another type": LINE.replace(b'"argv": []', b'"argv": {}'),
    "an empty line": b"\n",
    "binary": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0",
    "zeros inside": LINE[:40] + b"\0" + LINE[40:] + LINE,
}
ALONE = {"notes": b"some notes without a newline", "one byte": LINE[:1], "zeros": bytes(len(LINE))}
"""Behind a record, these are an unfinished line."""


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    ("name", "n_whole"), [*((name, n) for name in DAMAGED for n in (0, 1)), *((name, 0) for name in ALONE)]
)
def test_a_damaged_or_foreign_file_is_refused_by_line_and_not_changed(tmp_path, name, resume, n_whole):
    path = tmp_path / "records.jsonl"
    content = (make(1).to_json().encode() + b"\n") * n_whole + {**DAMAGED, **ALONE}[name]
    path.write_bytes(content)
    with pytest.raises(RecordFileError, match=f"damaged line {n_whole + 1} .*the file was not changed") as caught:
        RecordFile(path, resume=resume)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("last", "n_whole"),
    [*((LINE[:size], n) for size in (40, -1) for n in (0, 1, 3)), *((b, 1) for b in ALONE.values())],
)
def test_an_unfinished_line_is_dropped_and_said(tmp_path, last, n_whole):
    path = tmp_path / "records.jsonl"
    whole = b"".join(make(10 + value).to_json().encode() + b"\n" for value in range(n_whole))
    path.write_bytes(whole + last)
    for read in (RecordFile, read_records):
        with pytest.raises(RecordFileError, match=rf"damaged line {n_whole + 1} .*--resume"):
            read(path)
    assert path.read_bytes() == whole + last
    file = RecordFile(path, resume=True)
    assert file.dropped == (
        f"dropped one unfinished row at the end of {path} ({len(last)} bytes); it is measured again"
    )
    assert path.read_bytes() == whole
    file.append(make(2))
    assert len(read_records(path)) == n_whole + 1
    path.write_bytes(LINE + LINE)
    with pytest.raises(RecordFileError, match=r"damaged line 2 .*on an earlier line"):
        read_records(path)


HOLD = """
import sys; from prescore.bench.records import RecordFile
file = RecordFile(sys.argv[1], resume=True); print('held', flush=True); sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path):
    path = tmp_path / "records.jsonl"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RecordFileError, match="must not be in use, got another run that writes to it"):
            RecordFile(path, resume=True)
        holder.kill()
    file = RecordFile(path, resume=True)
    assert "must not be in use" in subprocess.run(command, capture_output=True, text=True, check=False).stderr
    file.close()
    file.close()
    assert subprocess.run(command, input="", capture_output=True, text=True, check=True).stdout == "held\n"


def test_only_regular_files_of_the_folder_hold_records(tmp_path):
    outside = tmp_path / "outside.jsonl"
    outside.write_bytes(LINE)
    folder = tmp_path / "run"
    (folder / "folder").mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    (folder / "beside").write_bytes(LINE)
    links = {"device": "/dev/null", "link": outside, "dangling": tmp_path / "nothing", "near": "beside"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    for name in ("folder", "pipe", *links):
        with pytest.raises(RecordFileError, match="must be a regular file, got something else of that name"):
            RecordFile(folder / name, resume=True)
    assert outside.read_bytes() == (folder / "beside").read_bytes() == LINE
    assert not (tmp_path / "nothing").exists()


def test_a_written_file_replaces_a_link_and_not_what_it_names(tmp_path):
    mine, link = tmp_path / "mine.csv", tmp_path / "run.csv"
    mine.write_text("mine")
    link.symlink_to(mine)
    with replacing(link) as working:
        working.write_text("table")
    assert (link.is_symlink(), link.read_text(), mine.read_text()) == (False, "table", "mine")
    with pytest.raises(FileNotFoundError), replacing(link):
        (tmp_path / "nothing").read_text()  # anything that fails on the way
    assert link.read_text() == "table"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.csv", "run.csv"]


def test_a_full_disk_leaves_whole_records(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(make(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.path.stat().st_size + 50, hard))
    try:
        with pytest.raises(OSError, match=r"one more record, got \[Errno.*make room and continue with --resume"):
            file.append(make(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [record.config["value"] for record in read_records(file.path)] == [1]


def test_records_need_no_torch():
    code = "import sys, prescore.bench.records; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
