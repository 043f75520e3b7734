import json
import subprocess
import sys

import pytest

from prescore.records import Record, RecordFile, RecordFileError, Row, measure, read_records, row_key


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
        b'{"command": "demo", "ke',
        b"not json\n",
        b"[1, 2]\n",
        b'{"command": "demo"}\n',
        b"\xff\xfe\n",
        b'{"command": "demo", "key": "k", "config": {}, "seed": 0, "figures": null, "seconds": 1}\n',
        b'{"command": "demo", "key": "k", "config": {}, "seed": 0, "figures": {}, "seconds": 1}\n',
    ],
    ids=["cut off", "no json", "no object", "fields missing", "no text", "no figures", "empty figures"],
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
    code = "import sys, prescore.records; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
