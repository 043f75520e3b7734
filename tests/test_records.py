import json
import os
import subprocess
import sys

import pytest

from prescore.bench.records import Record, RecordFile, RecordFileError, Row, measure, read_records, row_key


def make(value, seed=0):
    return measure("demo", Row({"value": value}, seed, lambda: {"double": 2 * value}))


def test_record_survives_the_round_trip():
    record = make(3)
    assert Record.from_json(record.to_json()) == record
    assert record.figures == {"double": 6}
    assert record.versions["prescore"]
    assert record.seconds >= 0


def test_numbers_json_does_not_have_are_kept_as_words():
    record = measure("demo", Row({}, None, lambda: {"worst": float("inf"), "share": [float("nan"), 1.0]}))
    line = record.to_json()
    assert json.loads(line)["figures"] == {"worst": "inf", "share": ["nan", 1.0]}


def test_a_figure_that_is_no_json_value_is_refused():
    with pytest.raises(TypeError, match="record must hold plain JSON values"):
        measure("demo", Row({}, 0, lambda: {"what": object()})).to_json()


def test_key_depends_on_settings_not_on_their_order():
    assert row_key("a", {"n": 1, "d": 2}, 0) == row_key("a", {"d": 2, "n": 1}, 0)
    different = {
        row_key("a", {"n": 1}, 0),
        row_key("b", {"n": 1}, 0),
        row_key("a", {"n": 2}, 0),
        row_key("a", {"n": 1}, 1),
    }
    assert len(different) == 4


def test_append_and_resume(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    first = RecordFile(path)
    first.append(make(1))
    first.append(make(2))
    first.close()
    again = RecordFile(path, resume=True)
    assert make(1).key in again
    assert make(3).key not in again
    again.append(make(3))
    assert [record.config["value"] for record in read_records(path)] == [1, 2, 3]
    assert again[make(2).key].figures == {"double": 4}
    assert len(again) == len(list(again)) == 3


def test_existing_records_need_resume(tmp_path):
    path = tmp_path / "records.jsonl"
    RecordFile(path).append(make(1))
    before = path.read_bytes()
    with pytest.raises(
        RecordFileError, match=r"must be new or empty, got 1 records in it; continue it with --resume"
    ):
        RecordFile(path)
    assert path.read_bytes() == before
    (tmp_path / "empty.jsonl").touch()
    assert len(RecordFile(tmp_path / "empty.jsonl")) == 0


def test_the_same_row_is_not_written_twice(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(make(1))
    with pytest.raises(ValueError, match="key must be new"):
        file.append(make(1))
    assert len(read_records(file.path)) == 1


@pytest.mark.parametrize(
    "damage",
    [
        b"not json\n",
        b"[1, 2]\n",
        b'{"command": "demo"}\n',
        b"\xff\xfe\n",
        b'{"command": "demo", "key": "k", "config": {}, "seed": 0, "figures": null, "seconds": 1}\n',
        b'{"command": "demo", "key": "k", "config": {}, "seed": 0, "figures": {}, "seconds": 1}\n',
    ],
    ids=["no json", "no object", "fields missing", "no text", "no figures", "empty figures"],
)
@pytest.mark.parametrize("resume", [True, False])
def test_a_damaged_file_is_refused_by_line_and_left_alone(tmp_path, damage, resume):
    path = tmp_path / "records.jsonl"
    RecordFile(path).append(make(1))
    with path.open("ab") as file:
        file.write(damage)
    before = path.read_bytes()
    with pytest.raises(RecordFileError, match=r"got a damaged line 2 .*the file was not changed") as caught:
        RecordFile(path, resume=resume)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


LINE = make(2).to_json().encode() + b"\n"
TORN = {
    "cut off": LINE[:40],
    "cut off by one": LINE[:-2],
    "one byte": LINE[:1],
    "zeros": bytes(len(LINE)),
    "zeros and a newline": bytes(len(LINE) - 1) + b"\n",
    "half zeros": LINE[:100] + bytes(4096),
    "zeros first": bytes(100) + LINE[100:],
    "not even text": b"\xff\xfe",
}


@pytest.mark.parametrize("n_whole", [0, 1, 3])
@pytest.mark.parametrize("name", TORN)
def test_a_torn_end_is_dropped_and_said(tmp_path, name, n_whole):
    path = tmp_path / "records.jsonl"
    whole = b"".join(make(10 + number).to_json().encode() + b"\n" for number in range(n_whole))
    path.write_bytes(whole + TORN[name])
    with pytest.raises(RecordFileError, match=rf"damaged line {n_whole + 1} .*--resume"):
        RecordFile(path)
    with pytest.raises(RecordFileError, match=rf"damaged line {n_whole + 1} .*--resume"):
        read_records(path)
    assert path.read_bytes() == whole + TORN[name]
    file = RecordFile(path, resume=True)
    assert file.dropped == (
        f"dropped one unfinished row at the end of {path} ({len(TORN[name])} bytes); it is run again"
    )
    assert path.read_bytes() == whole
    assert len(file) == n_whole
    file.append(make(2))
    assert path.read_bytes().startswith(whole)
    assert len(read_records(path)) == n_whole + 1


def test_zeros_behind_a_whole_line_go_and_the_line_stays(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(LINE + bytes(512))
    file = RecordFile(path, resume=True)
    assert make(2).key in file
    assert path.read_bytes() == LINE


def test_a_whole_file_is_left_alone(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(LINE + b"\n" + make(3).to_json().encode())
    before = path.read_bytes()
    assert RecordFile(path, resume=True).dropped is None
    assert path.read_bytes() == before


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


def test_whoever_opens_it_again_in_one_process_takes_it_over(tmp_path):
    path = tmp_path / "records.jsonl"
    first = RecordFile(path)
    first.append(make(1))
    second = RecordFile(tmp_path / "." / "records.jsonl", resume=True)
    with pytest.raises(RecordFileError, match="must be open, got a record after it was closed or opened again"):
        first.append(make(2))
    second.append(make(2))
    assert len(read_records(path)) == 2


def test_only_regular_files_hold_records(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    (tmp_path / "file").touch()
    for name in ("folder", "pipe", "link"):
        with pytest.raises(RecordFileError, match="must be a regular file, got something else of that name"):
            RecordFile(tmp_path / name)
    for name in ("file/records.jsonl", "file/deeper/records.jsonl"):
        with pytest.raises(RecordFileError, match="must lie in a directory, got"):
            RecordFile(tmp_path / name)


FILL = """
import resource, signal, sys
from prescore.bench.records import RecordFile
from prescore.bench.records import Row, measure
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


def test_a_full_disk_leaves_the_file_whole(tmp_path):
    path = tmp_path / "records.jsonl"
    done = subprocess.run([sys.executable, "-c", FILL, str(path)], capture_output=True, text=True, check=True)
    assert "must take one more record, got [Errno" in done.stdout
    assert "make room and continue with --resume" in done.stdout
    assert [record.config["value"] for record in read_records(path)] == [1]
    file = RecordFile(path, resume=True)
    assert file.dropped is None
    file.append(make(2))
    assert len(read_records(path)) == 2


def test_a_repeated_key_is_damage(tmp_path):
    path = tmp_path / "records.jsonl"
    line = make(1).to_json() + "\n"
    path.write_text(line + line)
    with pytest.raises(RecordFileError, match=r"damaged line 2 .*already on line 1"):
        read_records(path)


def test_a_missing_last_newline_does_not_join_two_records(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(make(1).to_json())
    RecordFile(path, resume=True).append(make(2))
    assert len(read_records(path)) == 2


def test_records_need_no_torch():
    code = "import sys, prescore.bench.records; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
