"""Kill measuring commands at random moments, fill their disk, continue them, and compare with undisturbed runs.

    python tools/kill_and_resume.py --kills 30

Each command runs on tiny inputs in its own process, which is killed with SIGKILL. No finished row may be lost or
repeated, and in the end every result is that of an undisturbed run, but for those in which two undisturbed runs
differ: times. A disk is full where the record file may not grow any further.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from prescore.bench.cli.main import main


class Disturbed(Exception):
    """Something that a crash must not do."""


def start(argv: Sequence[str], out: Path, room: int | None = None) -> tuple[int, int]:
    """Run or continue a command in a child process, whose files hold at most `room` bytes each.

    Returns:
        The process, and a pipe that holds what it writes to standard error.
    """
    argv = [*argv, "--out", str(out), "--json", *(["--resume"] if _records(out).exists() else [])]
    reader, writer = os.pipe()  # a file would be full as the disk is
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    code = 70
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(writer, 2)
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        code = main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        os._exit(code)


def wait(child: int, reader: int) -> tuple[int, str]:
    """The exit code of a process, a negative signal where it was killed, and what it wrote."""
    with os.fdopen(reader, encoding="utf-8", errors="replace") as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said[-500:]


def finish(argv: Sequence[str], out: Path) -> None:
    """Run or continue a command to its end."""
    code, said = wait(*start(argv, out))
    if code:
        raise Disturbed(f"{argv[0]} must end well, got exit code {code}: {said}")


def _records(out: Path) -> Path:
    return out / "records.jsonl"


def _finished(out: Path) -> bytes:
    """The complete lines of a record file."""
    content = _records(out).read_bytes() if _records(out).exists() else b""
    return content[: content.rfind(b"\n") + 1]


def _results(out: Path) -> dict[str, object]:
    """Every result by its row and path; a repeated row is refused."""
    rows = [json.loads(line) for line in _records(out).read_text().splitlines()]
    if len({row["key"] for row in rows}) != len(rows):
        raise Disturbed(f"every row must be there once, got {len(rows)} with repetitions in {out}")
    return {path: value for row in rows for path, value in _leaves(row["key"], row["results"])}


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict | list):
        for name, own in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(f"{path}/{name}", own)
    else:
        yield path, value


class Undisturbed:
    """What a command measures when nothing happens: twice, to separate times from other results."""

    def __init__(self, argv: Sequence[str], scratch: Path) -> None:
        runs = []
        for number in range(2):
            begin = time.monotonic()
            finish(argv, scratch / f"whole {number}")
            self.seconds = time.monotonic() - begin
            runs.append(_results(scratch / f"whole {number}"))
        self.paths = set(runs[0])
        # times may agree by chance
        same = {path: value for path, value in runs[0].items() if runs[1].get(path, None) == value}
        self.fixed = {path: value for path, value in same.items() if "seconds" not in path}
        self.size = _records(scratch / "whole 0").stat().st_size

    def compare(self, out: Path) -> None:
        """Refuse other rows or other results."""
        found = _results(out)
        if set(found) != self.paths:
            raise Disturbed(f"the same rows must be there, got others in {out}")
        off = [path for path, value in self.fixed.items() if found[path] != value]
        if off:
            raise Disturbed(f"results must be those of an undisturbed run, got another {off[0]} in {out}")


def kill_often(argv: Sequence[str], kills: int, scratch: Path, draw: random.Random, whole: Undisturbed) -> int:
    """Kill and continue a command; returns how many runs came to their end on the way."""
    done, runs = 0, 0
    out = scratch / "killed 0"
    while done < kills:
        before, (child, reader) = _finished(out), start(argv, out)
        time.sleep(draw.uniform(0, 0.9 * whole.seconds))
        os.kill(child, signal.SIGKILL)
        killed = wait(child, reader)[0] == -signal.SIGKILL
        done += killed
        if not _finished(out).startswith(before):
            raise Disturbed(f"finished rows must stay, got others in {out}")
        if not killed or len(_finished(out)) >= whole.size:
            finish(argv, out)
            whole.compare(out)
            runs += 1
            out = scratch / f"killed {runs}"
    finish(argv, out)
    whole.compare(out)
    return runs + 1


def fill_disk(argv: Sequence[str], disks: int, scratch: Path, draw: random.Random, whole: Undisturbed) -> None:
    """Let the disk be full at ever later moments of one run."""
    out = scratch / "full"
    for room in sorted(draw.sample(range(1, whole.size), disks)):
        before = _finished(out)
        code, said = wait(*start(argv, out, room))
        if code != 2 or "make room and continue with --resume" not in said:
            raise Disturbed(f"a full disk must be told with exit code 2, got {code}: {said}")
        if _records(out).read_bytes() != _finished(out) or not _finished(out).startswith(before):
            raise Disturbed(f"a full disk must leave whole rows, got something else in {out}")
    finish(argv, out)
    whole.compare(out)


def commands(scratch: Path) -> dict[str, list[str]]:
    """The measuring commands to disturb, on a tiny model or a small study."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
    from oracles.tiny_language_model import save_tiny_language_model

    model, text = save_tiny_language_model(scratch / "model"), scratch / "text.txt"
    text.write_text("The keys that matter are few, and centroids represent the others. " * 20)
    lines = (
        f"perplexity --model {model} -d {text} -n 128 --method paper:kmeans --method key-norm --top-k 8 --top-k 9",
        "paper planted --quick --n 400 --d 4 --method key-norm --method kmeans --rule nearest",
        "speed --quick -n 64 -n 128 --dim 16 --n-heads 1 --method default --method hyper --method paper:kmeans",
    )
    return {line.split()[0]: line.split() for line in lines}


def kill_all(argv: Sequence[str] | None = None) -> int:
    """The command; 1 = a crash did something that it must not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30, help="of each command")
    parser.add_argument("--disks", type=int, default=10, help="how often the disk of each is full")
    parser.add_argument("--command", action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        for name, command in commands(Path(folder)).items():
            if options.command and name not in options.command:
                continue
            scratch = Path(folder) / name
            try:
                whole = Undisturbed(command, scratch)
                runs = kill_often(command, options.kills, scratch, draw, whole)
                fill_disk(command, options.disks, scratch, draw, whole)
            except Disturbed as disturbed:
                sys.stdout.write(f"{name}: {disturbed}\n")
                return 1
            sys.stdout.write(
                f"{name}: {options.kills} kills in {runs} runs, {options.disks} full disks, "
                f"{len(whole.fixed)} of {len(whole.paths)} results compared\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(kill_all())
