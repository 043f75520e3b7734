"""Records that the docs quote can be read, and are named by their settings."""

from pathlib import Path

import pytest

from prescore.records import read_records

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "experiments").rglob("records*.jsonl"))


def test_there_are_some():
    assert len(FILES) > 10


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_committed_records_are_whole(path):
    records = read_records(path)
    assert records
    words = [word for record in records for word in record.argv]
    assert not [word for word in words if word.startswith("/")], "no address of a machine"
