"""`prescore perplexity --parallel` under torchrun."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from prescore.bench.records import RecordFile, read_records, row_key

pytest.importorskip("typer", reason="the command line needs the extra eval")
from prescore.bench.cli.main import main

SOURCE = Path(__file__).parent.parent.parent / "src"


def test_perplexity_on_three_ranks_is_that_of_one_process(tmp_path, capsys):
    """Also where the ranks have different numbers of heads."""
    from oracles.tiny_language_model import save_tiny_language_model

    model, text = save_tiny_language_model(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("".join(f"word {number * number % 97} and {number} again. " for number in range(60)))
    argv = ["perplexity", "--model", str(model), "-d", str(text), "-n", "192", "--leaf", "32", "--top-k", "8"]
    for method in ("exact", "local", "default", "paper:kmeans", "hyper", "streaming"):
        argv += ["--method", method]
    argv += ["--threads", "1", "--layers", "first:1"]
    assert main([*argv, "--out", str(tmp_path / "one")]) == 0
    one, wanted = read_records(tmp_path / "one" / "records.jsonl"), []
    for record in one:
        config = {**record.config, "ranks": 3}
        wanted.append(replace(record, config=config, key=row_key(record.command, config, record.seed)))
    RecordFile(tmp_path / "three" / "records.jsonl").append(wanted[0])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [*torchrun, "-m", "prescore", *argv, "--parallel", "--resume", "--out", str(tmp_path / "three")]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("perplexity:") == 1  # one rank talks
    assert f"1 of {len(one)} rows are finished" in done.stderr
    three = read_records(tmp_path / "three" / "records.jsonl")
    assert three[0] == wanted[0]
    assert len(wanted) == len(three) > 5
    for alone, parallel in zip(wanted[1:], three[1:], strict=True):
        assert parallel.key == alone.key
        found, expected = parallel.results, alone.results
        assert found["loss"] == pytest.approx(expected["loss"], abs=5e-5)
        assert found["reads_per_query"] == pytest.approx(expected["reads_per_query"], abs=0.02)
        assert (found["positions"], found["ranks"]) == (expected["positions"], 3)
        assert found["bytes_sent_per_layer"] > 0
        assert found["peak_megabytes"] >= found["start_megabytes"] > 0


def test_without_torchrun(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["perplexity", "--parallel"]) == 2
    wanted = "prescore: parallel must be started by torchrun --nproc-per-node N -m prescore, got a single process"
    assert wanted in capsys.readouterr().err
