"""The command line's base: exit codes, one-sentence errors, interruption and resuming."""

import json
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import metadata

import pytest

import prescore
import prescore.bench.cli.info as info
from prescore.bench.cli import options
from prescore.bench.cli.main import main
from prescore.bench.cli.options import Run, Session, progress
from prescore.bench.records import RecordFile, Row, read_records
from prescore.routed import device_check, plain, triton
from prescore.routed.native.library import VARIABLE, describe_native


def rows(calls, n=4, fail_at=None):
    def run(value):
        if value == fail_at:
            raise KeyboardInterrupt
        calls.append(value)
        return {"square": value**2}

    return [Row({"value": value}, 0, partial(run, value)) for value in range(n)]


def session(path, *, resume=False, as_json=False):
    return Session("demo", RecordFile(path / "records.jsonl", resume=resume), as_json, 1, "cpu")


def test_info_runs_without_what_windows_lacks():
    code = (
        "import sys; sys.modules.update(fcntl=None, resource=None); "
        "from prescore.bench.cli.main import main; sys.exit(main(['info', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["native"]


def test_info_tells_versions_scorers_and_extras(capsys, monkeypatch):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"prescore {prescore.__version__}\n"
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["torch"]
    assert facts["threads"] >= 1
    assert facts["native"] == describe_native()
    assert set(facts["extras"]) >= {"hf", "eval", "dev"}
    assert "typer" in facts["extras"]["eval"]["present"]
    monkeypatch.setattr(info, "_installed", lambda package: package != "pillow")
    assert main(["info"]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # a long reason is folded into several lines
    assert f"native operators {facts['native']}" in shown
    assert 'missing pillow: pip install ".[vision]" in a clone of prescore' in shown


def test_nothing_crashes_where_package_metadata_is_missing(capsys, monkeypatch):
    """On PYTHONPATH or copied into another package; the other packages may lack theirs too."""

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    triton.missing.cache_clear()
    for name in ("version", "requires", "distribution"):
        monkeypatch.setattr(metadata, name, missing)
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["prescore"] == prescore.__version__
    assert facts["extras"] == {}
    assert "triton must be installed" in facts["triton"]
    triton.missing.cache_clear()

    def needs_pillow():
        raise ModuleNotFoundError("no", name="PIL")

    monkeypatch.setattr(info, "collect", needs_pillow)
    assert main(["info"]) == 2
    said = "prescore: this command needs the package PIL: pip install pillow\n"
    assert capsys.readouterr().err == said


def test_info_names_and_clears_the_cache_of_models(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = tmp_path / "prescore" / "model" / "weights"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(bytes(3_000_000))
    (tmp_path / "other").write_text("of another program")
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["cache"], facts["cache_megabytes"]) == (str(tmp_path / "prescore"), 3.0)
    for megabytes in (3, 0):
        assert main(["info", "--clear-cache"]) == 0
        assert capsys.readouterr().out == f"removed {megabytes} MB in {tmp_path / 'prescore'}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_info_measures_no_gain_where_the_default_runs_exactly(capsys, monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    assert main(["info", "--measure", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["routing"] == "runs exactly: no native code"


def test_info_checks_the_kernels_on_a_gpu_and_times_them(capsys, monkeypatch):
    """On the CPU, with plain torch in place of the kernels."""
    assert main(["info", "--check-gpu"]) == 2
    assert "--check-gpu needs a GPU, got cpu" in capsys.readouterr().err
    monkeypatch.setattr(triton, "unsupported", lambda *_: [])
    monkeypatch.setattr(triton, "forward", plain.forward)
    monkeypatch.setattr(info, "_GPU_LENGTHS", (2600,))
    device_check.disagreement.cache_clear()
    results = info._check_gpu("cpu")
    device_check.disagreement.cache_clear()
    assert results["64 dimensions"] == "the kernels agree with plain torch"
    assert re.fullmatch(r"2600: \d+\.\d\dx", results["128 dimensions, prompts"])
    assert re.fullmatch(r"2600: \d+\.\d\dx", results["128 dimensions, steps"])


def test_info_warns_of_more_threads_than_physical_cores(tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    cores = [(0, 0), (0, 0), (0, 1), (1, 0)]  # two threads of one core, a second core, a second socket
    entries = [f"processor\t: {n}\nphysical id\t: {s}\ncore id\t: {c}" for n, (s, c) in enumerate(cores)]
    path.write_text("\n\n".join(entries) + "\n")
    for usable, wanted in (({0, 1, 2, 3}, (3, 2)), ({0, 1, 2}, (2, 1)), ({0, 1}, (1, 1)), ({9}, (None, None))):
        monkeypatch.setattr(info.os, "sched_getaffinity", lambda _, usable=usable: usable)
        assert tuple(info.physical_cores(path).values()) == wanted
    assert info.physical_cores(tmp_path / "none") == {"cores": None, "sockets": None}
    assert "set OMP_NUM_THREADS=2" in info.describe_threads(4, 2, 1)
    assert "numactl" in info.describe_threads(3, 3, 2)
    assert info.describe_threads(2, 2, 1) == info.describe_threads(2, None, None) == "2"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "Usage"),
        ("info --no-such-option", "No such option"),
        ("inof", "info"),
        ("speed --threads 100000", "--threads"),
        ("info --jsn", "--json"),
    ],
)
def test_bad_usage_is_exit_code_2(line, said, capsys):
    assert main(line.split()) == 2
    shown = capsys.readouterr()
    assert said in shown.out + shown.err
    assert "Traceback" not in shown.err


BUG = "prescore: ZeroDivisionError: division by zero; --debug shows where\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("n must be at least 1, got 0"), 2, "prescore: n must be at least 1, got 0\n"),
        (OSError("disk is full"), 2, "prescore: disk is full\n"),
        (ModuleNotFoundError("no", name="elsewhere"), 2, "needs the package elsewhere\n"),
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


@pytest.mark.parametrize(
    ("line", "module", "extra"),
    [
        ("vision --quick", "PIL", "vision"),
        ("paper appendix-g --quick", "transformers.utils", "vision"),
        ("info", "transformers.utils", "hf"),
    ],
)
def test_a_missing_package_names_the_line_that_installs_it_from_a_clone(line, module, extra, capsys, monkeypatch):
    def missing(*args, **options):
        raise ModuleNotFoundError("no", name=module)

    monkeypatch.setattr(info, "collect", missing)
    monkeypatch.setattr("prescore.bench.cli.vision.VisionOptions.study", missing)
    assert main(line.split()) == 2
    said, package = capsys.readouterr().err, module.split(".")[0]
    assert said == (
        f'prescore: this command needs the package {package}: pip install ".[{extra}]" in a clone of prescore\n'
    )


def test_interrupted_and_resumed_loses_and_repeats_nothing(tmp_path, capsys):
    calls = []
    first = session(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        first.run(rows(calls, fail_at=2))
    first.file.close()
    assert stopped.value.code == 130
    assert "continue with --resume" in capsys.readouterr().err
    records = session(tmp_path, resume=True).run(rows(calls))
    assert calls == [0, 1, 2, 3]
    assert [record.config["value"] for record in records] == [0, 1, 2, 3]
    assert "2 of 4 rows are finished" in capsys.readouterr().err


def test_a_row_is_its_settings_and_is_measured_and_printed_once(tmp_path, capsys):
    calls = []
    records = session(tmp_path, as_json=True).run([*rows(calls, n=3), *rows(calls, n=3)])
    assert calls == [record.config["value"] for record in records] == [0, 1, 2]
    assert [json.loads(line)["results"]["square"] for line in capsys.readouterr().out.splitlines()] == [0, 1, 4]
    assert read_records(tmp_path / "records.jsonl") == records
    session(tmp_path, resume=True).run([Row({"value": 0}, 1, lambda: {"square": 0})])  # another seed
    assert len(read_records(tmp_path / "records.jsonl")) == 4


def test_resume_finds_the_newest_run_that_measured_something(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new = Run(seed=0, out=None, json=False, resume=False, quick=False, threads=None)
    monkeypatch.setattr("prescore.bench.cli.options.time.strftime", lambda *_: "20260101-000000")
    first = new.open("demo")
    first.run(rows([], n=1))
    assert first.out.parts[:2] == ("runs", "demo")
    first.file.close()
    monkeypatch.setattr("prescore.bench.cli.options.time.strftime", lambda *_: "20260102-000000")
    new.open("demo")  # as a refused model leaves it
    (tmp_path / "runs" / "demo" / "loop").mkdir()
    (tmp_path / "runs" / "demo" / "loop" / "records.jsonl").symlink_to("records.jsonl")
    again = replace(new, resume=True).open("demo")
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


def test_progress_counts_rows_that_follow_from_others(saved, text, tmp_path, monkeypatch):
    shown = []

    @contextmanager
    def counted(title, total):
        shown.append([total])
        yield shown[-1].append

    monkeypatch.setattr(options, "progress", counted)
    words = f"perplexity -d {text} --model {saved} -n 64 -n 96 --held-out --out {tmp_path / 'run'}".split()
    assert main(words) == 0
    ((total, *done),) = shown
    assert sum(done) == pytest.approx(total)
    assert len(done) == len(read_records(tmp_path / "run" / "records.jsonl"))
    assert main([*words, "--resume"]) == 0
    assert shown[1] == [0]


def test_a_command_continues_a_torn_record_file_and_refuses_a_damaged_one(tmp_path, lines, capsys):
    records = tmp_path / "records.jsonl"
    line = f"paper planted --quick --n 400 --d 4 --method key-norm --rule nearest --out {tmp_path} --json"
    assert main(line.split()) == 0
    whole = records.read_bytes()
    before = [(record["key"], record["results"]) for record in lines(tmp_path)]
    assert main(line.split()) == 2  # without --resume
    assert records.read_bytes() == whole
    records.write_bytes(whole[: whole[:-1].rindex(b"\n") + 51])
    capsys.readouterr()
    assert main([*line.split(), "--resume"]) == 0
    shown = capsys.readouterr()
    assert f"dropped one unfinished row at the end of {records} (50 bytes); it is measured again" in shown.err
    assert f"{len(before) - 1} of {len(before)} rows are finished" in shown.err
    assert [(record["key"], record["results"]) for record in lines(tmp_path)] == before
    assert len(shown.out.splitlines()) == len(before)
    records.write_text("no record\n")
    assert main([*line.split(), "--resume"]) == 2
    assert "damaged line 1" in capsys.readouterr().err
    assert records.read_text() == "no record\n"


PLANTED = "paper planted --quick --n 400 --d 4 --method key-norm --rule nearest --seeds 1"


@pytest.mark.parametrize(
    ("line", "file"),
    [
        (PLANTED, "planted-mine.png"),
        ("perplexity -d TEXT --model MODEL -n 64 --method exact", "perplexity.csv"),
        ("paper table1 -d TEXT --model MODEL -n 64", "table1-as-printed.csv"),
        ("perplexity -d TEXT --model MODEL -n 64 --held-out", "default.md"),
        ("demo -d TEXT --model MODEL -n 128", "index.html"),
        ("speed --quick", "curves.png"),
    ],
)
def test_a_new_run_replaces_no_file_that_is_there(line, file, saved, text, tmp_path, capsys):
    out = tmp_path / "mine"
    out.mkdir()
    (out / file).write_text("mine")
    words = line.replace("TEXT", text).replace("MODEL", saved).split()
    assert main([*words, "--out", str(out)]) == 2
    assert f"{file} must not be there before a new run" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [(file, "mine")]


def test_the_report_replaces_only_a_report(saved, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "report" / "index.html"
    page.parent.mkdir()
    page.write_text("my thesis")
    assert main(["demo", "-d", text, "--model", saved, "-n", "128"]) == 2
    assert "must be a report of prescore or absent" in capsys.readouterr().err
    assert page.read_text() == "my thesis"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "results", [{"a": 1}, {"recall": None, "claims": "x"}, {"recall": {"x": []}, "claims": [1]}], ids=str
)
def test_edited_results_are_one_sentence(results, tmp_path, lines, capsys):
    words = [*PLANTED.split(), "--out", str(tmp_path)]
    assert main(words) == 0
    edited = "".join(json.dumps({**line, "results": results}) + "\n" for line in lines(tmp_path))
    (tmp_path / "records.jsonl").write_text(edited)
    capsys.readouterr()
    assert main([*words, "--resume"]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("prescore: ")]
    assert "records.jsonl must hold results as they were measured, got others (" in "".join(said)
    assert (tmp_path / "records.jsonl").read_text() == edited


def test_a_fault_in_a_new_run_is_not_blamed_on_records(tmp_path):
    with pytest.raises(KeyError), session(tmp_path).reading():
        {}["a bug"]


@pytest.mark.parametrize("out", ["loop", "loop/deeper", "file", "file/deeper"])
def test_a_directory_that_cannot_be_is_one_sentence(out, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("mine")
    assert main([*PLANTED.split(), "--out", out]) == 2
    said = capsys.readouterr().err
    assert said.startswith("prescore: ")
    assert said.count("\n") == 1
    assert "directory" in said
    assert (tmp_path / "file").read_text() == "mine"
