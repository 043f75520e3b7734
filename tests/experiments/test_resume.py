"""Committed rows are found again: `--resume` does not measure them anew."""

from pathlib import Path

import pytest

from prescore.bench.records import read_records, row_key
from prescore.bench.speed.studies import Run, plan_rows

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SETTINGS = ("heads", "dim", "dtype", "repeats", "top_k", "min_seq_len", "methods", "memory")


def lengths(config, seed):
    settings = {name: config[name] for name in SETTINGS}
    kind = {"causal": [config["causal"]], "backward": [config["backward"]]}
    return plan_rows(Run(settings, lengths=[config["n"]], seed=seed, **kind), ["lengths"])


def steps(config, seed):
    settings = {**dict.fromkeys(SETTINGS), **config, "top_k": 1, "min_seq_len": 1, "methods": ["default"]}
    return plan_rows(Run(settings, lengths=[config["n"]], seed=seed), ["steps"])


@pytest.mark.parametrize(
    ("folder", "plan"), [("speed/long", lengths), ("speed/subclusters", lengths), ("speed", steps)]
)
def test_rows_of_speed(folder, plan):
    records = [
        r for r in read_records(EXPERIMENTS / folder / "records.jsonl") if r.config["study"] == plan.__name__
    ]
    assert records
    for record in records:
        assert record.key in {row_key("speed", row.config, row.seed) for row in plan(record.config, record.seed)}


def test_rows_of_scripts(load_script):
    ranks = load_script("parallel/ranks.py")
    for record in read_records(EXPERIMENTS / "parallel/bytes/records.jsonl"):
        c, seed = record.config, record.seed
        rows = ranks.plan_rows([c["n"]], c["heads"], c["dim"], c["repeats"], seed)
        assert record.key in {row_key("speed", row.config, row.seed) for row in rows}
