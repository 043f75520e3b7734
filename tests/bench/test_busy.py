"""A busy machine is noticed, an idle one is not, and every table says so."""

from dataclasses import replace

import pytest

from prescore.bench import busy
from prescore.bench.busy import busy_words, watch
from prescore.bench.cli.options import Session
from prescore.bench.records import Record, RecordFile, Row, measure


def record(others, *, cores=2, threads=2, seconds=9.0):
    load = {} if others is None else {"processor_seconds": 1.0, "cores": cores, "others": others}
    return Record("demo", "key", {}, 0, {"a": 1}, seconds, threads=threads, load=load)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (record(None), None),
        (record(0.0), None),
        (record(0.29), None),
        (record(0.31), "0.3"),
        (record(1.7), "1.7"),
        (record(1.1, threads=1), None),  # on the core that is free
        (record(1.2, threads=1), "1.2"),
        (record(40.0, cores=64, threads=8), None),
        (record(60.0, cores=64, threads=8), "60.0"),
        (record(1.0, threads=99), "1.0"),
        (record(1.7, seconds=0.5), None),  # too short to tell
    ],
)
def test_who_is_disturbed(given, said):
    words = busy_words([record(0.0), given])
    assert words == (
        f"busy machine: other processes had up to {said} cores; times are not comparable" if said else ""
    )


STAT = "cpu  9 9 9 9 9\ncpu0 {} 0 0 500 30 0 0 {} 7 7\ncpu1 {} 0 0 500 0 0 0 0 0 0\ncpu2 900 0 0 0\nintr 5\n"


def test_what_others_had_is_all_but_ours_and_idle_time(tmp_path, monkeypatch):
    """On the processors that this process may use, time stolen by other guests of the host included."""
    stat, clock, own = tmp_path / "stat", iter([10.0, 14.0]), iter([1.0, 3.0])
    monkeypatch.setattr(busy, "_STAT", stat)
    monkeypatch.setattr(busy.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(busy, "_own_seconds", lambda: next(own))
    monkeypatch.setattr(busy, "_usable", lambda: [0, 1])
    ticks = busy.os.sysconf("SC_CLK_TCK")
    stat.write_text(STAT.format(0, 0, 0))
    load = watch()
    stat.write_text(STAT.format(3 * ticks, ticks, ticks))
    assert load() == {"processor_seconds": 2.0, "cores": 2, "others": 0.75}  # 5 s in all, 2 s of them ours, in 4 s


def test_where_the_system_does_not_tell_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(busy, "_STAT", tmp_path / "none")
    measured = measure("demo", Row({}, 0, lambda: {"a": 1}))
    assert "others" not in measured.load
    assert measured.load["processor_seconds"] >= 0
    assert Record.from_json(measured.to_json()) == measured


def test_every_command_says_so_below_its_tables(tmp_path, capsys, monkeypatch):
    session = Session("demo", RecordFile(tmp_path / "records.jsonl"), json=False, threads=1, device="cpu")
    session.file.append(record(0.1))
    session.show("a table")
    assert capsys.readouterr().out.split("\n") == ["a table", ""]
    session.file.append(replace(record(1.9), key="other"))
    session.show("a table")
    assert "a table\nbusy machine: other processes had up to 1.9 cores" in capsys.readouterr().out
