"""Records of several ranks as a table: bytes sent and times, beside the gathering of all keys."""

from __future__ import annotations

from collections.abc import Sequence

from prescore.records import Record
from prescore.report.tables import Table

_MEGA = 2**20


def parallel_table(records: Sequence[Record]) -> Table:
    """One line for each way, length and number of ranks."""
    rows = []
    for record in records:
        config = record.config
        if config["study"] != "parallel":
            continue
        kind = f"{'causal' if config['causal'] else 'full'}{', + backward' if config['backward'] else ''}"
        for name, figures in record.figures["ways"].items():
            rows.append(
                (
                    kind,
                    str(config["n"]),
                    str(config["ranks"]),
                    name,
                    figures["way"],
                    f"{figures['bytes'] / _MEGA:.3f}",
                    f"{figures['of_all_gather']:.3f}",
                    f"{1e3 * figures['seconds']:.1f}",
                )
            )
    note = (
        "MB sent by the busiest rank in one call (one layer), counted; a ring sends what all-gather sends; "
        "time of the slowest rank, all ranks on this machine"
    )
    header = ("", "n", "ranks", "configuration", "way", "MB sent", "of all-gather", "ms")
    return Table("Several ranks", header, tuple(rows), note, left=5)
