"""Records that the docs quote can be read, are named by their settings, and hold configurations of today."""

from pathlib import Path

import pytest

from prescore import config_from_dict
from prescore.bench.records import read_records

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "experiments").rglob("records*.jsonl"))


def configurations(record):
    """The configurations inside a record's settings."""
    found = [record.config[name] for name in ("config",) if name in record.config]
    method = record.config.get("method")
    return found + ([method["settings"]] if isinstance(method, dict) and method["kind"] == "prescored" else [])


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
