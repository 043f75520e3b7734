"""A planted-model sweep, run in memory."""

from prescore.bench.planted.study import COMMAND, rows
from prescore.bench.records import measure


def run_sweep(sweep):
    return [measure(COMMAND, row, threads=1) for row in rows(sweep)]
