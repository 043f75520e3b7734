"""Commands on several ranks: `torchrun` starts them all, rank 0 keeps the records and talks, the others follow."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prescore.cli.options import RECORDS, Session
from prescore.record_file import RecordFile
from prescore.records import Record

if TYPE_CHECKING:
    from prescore.parallel.group import Group

Parallel = Annotated[
    bool,
    typer.Option(
        "--parallel",
        help="Sequences lie on the ranks that torchrun started: "
        "torchrun --nproc-per-node 4 -m prescore perplexity ... --parallel",
    ),
]


@contextmanager
def joined_ranks(parallel: bool, device: str) -> Iterator[Group | None]:
    """The ranks that torchrun started, joined inside the block; None where nobody asked for them."""
    if not parallel:
        yield None
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "parallel must be started by torchrun --nproc-per-node N -m prescore, got a single process"
        )
    import torch.distributed as dist

    from prescore.parallel.group import as_group

    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield as_group(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@contextmanager
def shared_session(session: Session | None, ranks: Group | None, command: str) -> Iterator[Session]:
    """Rank 0's session; every other rank has a silent one, in a folder that goes, with the same finished rows.

    Args:
        session: Of rank 0, or of the only process; None elsewhere.
        ranks: None = there is one process.
        command: What is run.
    """
    if ranks is None:
        if session is None:
            raise ValueError("session must be given to a single process, got None")
        yield session
        return
    import torch
    import torch.distributed as dist

    lines: list[list[str] | None] = [None if session is None else [record.to_json() for record in session.file]]
    dist.broadcast_object_list(lines, src=0)
    if session is not None:
        yield dataclasses.replace(session, device=f"{session.device} x {ranks.size}")
        return
    with tempfile.TemporaryDirectory() as folder:
        file = RecordFile(Path(folder) / RECORDS)
        for line in lines[0] or []:
            file.append(Record.from_json(line))
        yield Session(command, file, False, torch.get_num_threads(), "cpu", quiet=True)
