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
from dataclasses import dataclass
from pathlib import Path

from prescore.bench.cli.main import main
from prescore.bench.records import without_torn_end


class Disturbed(Exception):
    """Something that a crash must not do."""


@dataclass(frozen=True)
class Command:
    """A command on something tiny."""

    name: str
    argv: tuple[str, ...]

    def start(self, out: Path, room: int | None = None) -> Running:
        """Run or continue it in a process of its own, whose files hold at most `room` bytes each."""
        argv = [*self.argv, "--out", str(out), "--json", *(["--resume"] if _records(out).exists() else [])]
        reader, writer = os.pipe()  # a file would be full as the disk is
        child = os.fork()
        if child:
            os.close(writer)
            return Running(child, reader)
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

    def finish(self, out: Path) -> None:
        """Run or continue it to its end."""
        code, said = self.start(out).wait()
        if code:
            raise Disturbed(f"{self.name} must end well, got exit code {code}: {said}")


@dataclass(frozen=True)
class Running:
    """A command that runs, and the pipe that it says things through."""

    child: int
    reader: int

    def wait(self) -> tuple[int, str]:
        """Its exit code, a negative signal where it was killed, and what it said."""
        with os.fdopen(self.reader, encoding="utf-8", errors="replace") as pipe:
            said = pipe.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1]), said[-500:]


def _records(out: Path) -> Path:
    return out / "records.jsonl"


def _finished(out: Path) -> bytes:
    """The whole lines of a record file."""
    return without_torn_end(_records(out).read_bytes()) if _records(out).exists() else b""


def _results(out: Path) -> dict[str, object]:
    """Every result by its row and path; a repeated row is refused."""
    results: dict[str, object] = {}
    rows = [json.loads(line) for line in _records(out).read_text().splitlines()]
    if len({row["key"] for row in rows}) != len(rows):
        raise Disturbed(f"every row must be there once, got {len(rows)} with repetitions in {out}")
    for row in rows:
        results.update(_leaves(row["key"], row["results"]))
    return results


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for name, own in value.items():
            yield from _leaves(f"{path}/{name}", own)
    elif isinstance(value, list):
        for place, own in enumerate(value):
            yield from _leaves(f"{path}/{place}", own)
    else:
        yield path, value


class Undisturbed:
    """What a command measures when nothing happens: twice, so that times can be told from other results."""

    def __init__(self, command: Command, scratch: Path) -> None:
        runs = []
        for number in range(2):
            begin = time.monotonic()
            command.finish(scratch / f"whole {number}")
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


def kill_often(command: Command, kills: int, scratch: Path, draw: random.Random, whole: Undisturbed) -> int:
    """Kill and continue a command; returns how many runs came to their end on the way."""
    done, runs = 0, 0
    out = scratch / "killed 0"
    while done < kills:
        before, running = _finished(out), command.start(out)
        time.sleep(draw.uniform(0, 0.9 * whole.seconds))
        os.kill(running.child, signal.SIGKILL)
        killed = running.wait()[0] == -signal.SIGKILL
        done += killed
        if not _finished(out).startswith(before):
            raise Disturbed(f"finished rows must stay, got others in {out}")
        if not killed or len(_finished(out)) >= whole.size:
            command.finish(out)
            whole.compare(out)
            runs += 1
            out = scratch / f"killed {runs}"
    command.finish(out)
    whole.compare(out)
    return runs + 1


def fill_disk(command: Command, disks: int, scratch: Path, draw: random.Random, whole: Undisturbed) -> None:
    """Let the disk be full at ever later moments of one run."""
    out = scratch / "full"
    for room in sorted(draw.sample(range(1, whole.size), disks)):
        before = _finished(out)
        code, said = command.start(out, room).wait()
        if code != 2 or "make room and continue with --resume" not in said:
            raise Disturbed(f"a full disk must be told with exit code 2, got {code}: {said}")
        if _records(out).read_bytes() != _finished(out) or not _finished(out).startswith(before):
            raise Disturbed(f"a full disk must leave whole rows, got something else in {out}")
    command.finish(out)
    whole.compare(out)


def commands(scratch: Path) -> list[Command]:
    """The measuring commands to disturb, on a tiny model or a small study."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
    from oracles.tiny_language_model import save_tiny_language_model

    model = save_tiny_language_model(scratch / "model")
    text = scratch / "text.txt"
    text.write_text("The keys that matter are few, and centroids represent the others. " * 20)
    language = (
        "--model",
        str(model),
        "-d",
        str(text),
        "-n",
        "128",
        "--method",
        "paper:kmeans",
        "--method",
        "key-norm",
    )
    budgets = ("--top-k", "8", "--top-k", "16", "--top-k", "24")
    planted = ("--quick", "--n", "400", "--d", "4", "--method", "key-norm", "--method", "kmeans")
    speed = ("--quick", "--n", "64", "--n", "128", "--dim", "16", "--n-heads", "1", "--method", "default")
    return [
        Command("perplexity", ("perplexity", *language, *budgets)),
        Command("planted", ("planted", *planted, "--rule", "nearest")),
        Command("speed", ("speed", *speed, "--method", "hyper", "--method", "paper:kmeans")),
    ]


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
        for command in commands(Path(folder)):
            if options.command and command.name not in options.command:
                continue
            scratch = Path(folder) / command.name
            try:
                whole = Undisturbed(command, scratch)
                runs = kill_often(command, options.kills, scratch, draw, whole)
                fill_disk(command, options.disks, scratch, draw, whole)
            except Disturbed as disturbed:
                sys.stdout.write(f"{command.name}: {disturbed}\n")
                return 1
            sys.stdout.write(
                f"{command.name}: {options.kills} kills in {runs} runs, {options.disks} full disks, "
                f"{len(whole.fixed)} of {len(whole.paths)} results compared\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(kill_all())
