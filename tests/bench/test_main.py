"""The command line's base: exit codes, one-sentence errors, interruption and resuming."""

import json
import signal
import subprocess
import sys
import time

import pytest

import prescore
import prescore.bench.cli.info as info
from prescore.bench.cli.main import main
from prescore.bench.cli.options import Session, open_session, progress
from prescore.bench.records import RecordFile, Row, read_records
from prescore.ops.native.library import describe_native


def rows(calls, n=4, fail_at=None, error=KeyboardInterrupt):
    def measure(value):
        def run():
            if value == fail_at:
                raise error
            calls.append(value)
            return {"square": value**2}

        return run

    return [Row({"value": value}, 0, measure(value)) for value in range(n)]


def session(path, *, resume=False, as_json=False):
    return Session("demo", RecordFile(path / "records.jsonl", resume=resume), as_json, 1, "cpu")


def test_info_tells_versions_scorers_and_extras(capsys, monkeypatch):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["torch"]
    assert facts["threads"] >= 1
    assert facts["native"] == describe_native()
    assert set(facts["extras"]) >= {"hf", "eval", "dev"}
    assert "typer" in facts["extras"]["eval"]["present"]
    monkeypatch.setattr(info, "_installed", lambda package: package != "timm")
    assert main(["info"]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # a long reason is folded into several lines
    assert "scorers" in shown
    assert f"native operators {describe_native()}" in shown
    assert "missing timm: pip install 'prescore[vision]'" in shown


@pytest.mark.parametrize(
    "argv",
    [
        *([], ["no-such-command"], ["info", "--no-such-option"]),
        *(["speed", "--quick", "--layers", "0,1"], ["speed", "--quick", "--threads", "100000"]),
    ],
)
def test_bad_usage_is_exit_code_2(argv, capsys):
    assert main(argv) == 2
    assert "Traceback" not in capsys.readouterr().err


BUG = "prescore: ZeroDivisionError: division by zero; --debug shows where\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("n must be at least 1, got 0"), 2, "prescore: n must be at least 1, got 0\n"),
        (OSError("disk is full"), 2, "prescore: disk is full\n"),
        (ModuleNotFoundError("no", name="timm"), 2, "needs the package timm"),
        (ZeroDivisionError("division by zero"), 1, BUG),  # a bug is not bad usage
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(130), 130, ""),
    ],
)
def test_errors_of_a_command_become_one_sentence(error, code, said, capsys, monkeypatch):
    def refuse():
        raise error

    monkeypatch.setattr(info, "collect", refuse)
    assert main(["info"]) == code
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown
    for argv in (["--debug", "info"], ["info", "--debug"]):
        assert main(argv) == code
        assert ("Traceback" in capsys.readouterr().err) == isinstance(error, Exception)


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"prescore {prescore.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["inof"], "info"),
        (["info", "--jsn"], "--json"),
        (["planted", "--quick", "--methd", "kmeans"], "--method"),
        (["planted", "--quick", "--method", "kmean"], "(did you mean 'kmeans'?)"),
        (["perplexity", "--method", "defalt"], "(did you mean 'default'?)"),
        (["perplexity", "--set", "min_weigth=3"], "(did you mean 'min_weight'?)"),
        (["generate", "--prompt", "a", "--config", "key-dif"], "(did you mean 'key-diff'?)"),
        (["speed", "--study", "lenghts"], "(did you mean 'lengths'?)"),
    ],
    ids=" ".join,
)
def test_what_is_misspelt_is_told_the_nearest(argv, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "did you mean" in shown.lower() or "possible options" in shown.lower()


def test_session_writes_each_row_as_it_is_finished(tmp_path, capsys):
    calls = []
    records = session(tmp_path, as_json=True).run(rows(calls))
    assert calls == [0, 1, 2, 3]
    assert [record.results["square"] for record in records] == [0, 1, 4, 9]
    assert read_records(tmp_path / "records.jsonl") == records
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["config"]["value"] for line in lines] == [0, 1, 2, 3]


def test_interrupted_and_resumed_loses_and_repeats_nothing(tmp_path, capsys):
    calls = []
    with pytest.raises(SystemExit) as stopped:
        session(tmp_path).run(rows(calls, fail_at=2))
    assert stopped.value.code == 130
    assert "continue with --resume" in capsys.readouterr().err
    records = session(tmp_path, resume=True).run(rows(calls))
    assert calls == [0, 1, 2, 3]
    assert [record.config["value"] for record in records] == [0, 1, 2, 3]
    assert "2 of 4 rows are finished" in capsys.readouterr().err


def test_a_row_is_its_settings_and_is_measured_once(tmp_path, capsys):
    calls = []
    records = session(tmp_path, as_json=True).run([*rows(calls, n=2), *rows(calls, n=2)])
    assert calls == [record.config["value"] for record in records] == [0, 1]
    assert len(capsys.readouterr().out.splitlines()) == 2
    session(tmp_path, resume=True).run([Row({"value": 0}, 1, lambda: {"square": 0})])  # another seed
    assert len(read_records(tmp_path / "records.jsonl")) == 3


def test_resume_finds_the_newest_run_that_measured_something(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"out": None, "json": False, "threads": None}
    monkeypatch.setattr("prescore.bench.cli.options.time.strftime", lambda *_: "20260101-000000")
    first = open_session("demo", resume=False, **options)
    first.run(rows([], n=1))
    assert first.out.parts[:2] == ("runs", "demo")
    monkeypatch.setattr("prescore.bench.cli.options.time.strftime", lambda *_: "20260102-000000")
    open_session("demo", resume=False, **options)  # as a refused model leaves it
    again = open_session("demo", resume=True, **options)
    assert again.out == first.out
    assert len(again.file) == 1


def test_progress_without_a_terminal_tells_the_time_left(capsys, monkeypatch):
    monkeypatch.setattr("prescore.bench.cli.options._LINE_EVERY", 0.0)
    with progress("demo", 4) as advance:
        advance(1)
        advance(3)
    shown = capsys.readouterr().err
    assert "demo: 25 %" in shown
    assert "demo: 100 %, 0 s left" in shown


def planted(*argv, cwd):
    small = ["--quick", "--n", "400", "--d", "4", "--method", "key-norm", "--method", "kmeans"]
    command = [sys.executable, "-m", "prescore.bench.cli.main", "planted", *small, "--rule", "nearest", *argv]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_study_resumes_without_loss_or_repetition(tmp_path):
    records = tmp_path / "out" / "records.jsonl"
    first = planted("--out", "out", "--json", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and first.poll() is None:
        if records.exists() and records.read_bytes().count(b"\n") >= 2:
            break
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = records.read_bytes()
    assert before.count(b"\n") >= 2

    refused = planted("--out", "out", cwd=tmp_path)
    _, said = refused.communicate()
    assert refused.returncode == 2
    assert "--resume" in said
    assert records.read_bytes() == before

    second = planted("--out", "out", "--json", "--resume", cwd=tmp_path)
    shown, said = second.communicate()
    assert second.returncode == 0, said
    assert records.read_bytes().startswith(before)
    found = [record.key for record in read_records(records)]
    assert len(found) == len(set(found)) == len(shown.splitlines())


def test_a_command_continues_a_torn_record_file_and_refuses_a_damaged_one(tmp_path):
    records = tmp_path / "records.jsonl"
    run = planted("--out", str(tmp_path), "--json", cwd=tmp_path)
    run.communicate()
    whole = records.read_bytes()
    lines = whole.splitlines(keepends=True)
    records.write_bytes(b"".join(lines[:-1]) + lines[-1][:50] + bytes(200))
    again = planted("--out", str(tmp_path), "--json", "--resume", cwd=tmp_path)
    shown, said = again.communicate()
    assert again.returncode == 0, said
    assert f"dropped one unfinished row at the end of {records} (250 bytes); it is measured again" in said
    assert f"{len(lines) - 1} of {len(lines)} rows are finished" in said
    before, after = (
        {record["key"]: record["results"] for record in map(json.loads, content.splitlines())}
        for content in (whole, records.read_bytes())
    )
    assert before == after
    assert len(shown.splitlines()) == len(lines)
    records.write_text("no record\n")
    refused = planted("--out", str(tmp_path), "--resume", cwd=tmp_path)
    _, said = refused.communicate()
    assert refused.returncode == 2
    assert "damaged line 1" in said
    assert len(said.splitlines()) == 1
    assert records.read_text() == "no record\n"
