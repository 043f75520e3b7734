"""Single decode steps in compiled code: a call whose tables are checked once, and stay where they are.

A step takes a fraction of a millisecond, which looking at everything again would double.
"""

from __future__ import annotations

import ctypes
import math

from torch import Tensor

from prescore.routed.compiled.call import FarCall, Tables
from prescore.routed.compiled.checked import call_library, check_lanes, check_row_tensor, real_numbers, rows_struct
from prescore.routed.far import SINK_PART, Search
from prescore.routed.stand_ins import MOST_KNOWN_GAIN
from prescore.types import Attended


class PreparedStep:
    """Steps over nodes that stay: queries, keys and values come with each of them.

    Args:
        tables: The nodes, with one covariance for all of them.
        search: What is looked for.
        scale: Factor of the logits.
    """

    def __init__(self, tables: Tables, search: Search, scale: float) -> None:
        self._tables, n_lanes = tables, tables.rows.shape[0]
        self._visible, self._first, self._stop = ((ctypes.c_int32 * n_lanes)() for _ in range(3))
        self._counts = (ctypes.c_int64 * 2)()
        self._call = FarCall(
            visible=ctypes.addressof(self._visible),
            first=ctypes.addressof(self._first),
            stop=ctypes.addressof(self._stop),
            counts=ctypes.addressof(self._counts),
            **tables.pointers,
            **tables.counts,
            length=1,
            nodes_per_pool=max(1, tables.nodes),
            scale=scale,
            reach=search.reach,
            log_share=search.log_share,
            most_known_gain=MOST_KNOWN_GAIN,
            log_sink_part=math.log(SINK_PART),
        )

    def attend(
        self, query: Tensor, rows: tuple[Tensor, Tensor], n_nodes: int, first: int
    ) -> tuple[Attended, float]:
        """One query `[T, G, 1, D]` over keys and values `[B, Hkv, N, D]`, the newest being its own.

        Args:
            query: Of every head.
            rows: Keys and values.
            n_nodes: Nodes that it sees.
            first: From which row on it reads everything.

        Returns:
            The result, and the rows found by a query on average.
        """
        (key, value), (n_lanes, group) = rows, query.shape[:2]
        self._check(query, key, value, n_nodes, first)
        output, lse, limit = (real_numbers(n_lanes, group, 1, *more) for more in ((value.shape[-1],), (), ()))
        for numbers, number in ((self._visible, n_nodes), (self._first, first), (self._stop, key.shape[2])):
            numbers[:] = [number] * n_lanes
        self._counts[:] = [0, 0]
        call, where = self._call, [rows_struct(t) for t in (query, key, value)]
        call.query, call.key, call.value = where
        call.n_query = group
        call.output, call.lse, call.limit = output.data_ptr(), lse.data_ptr(), limit.data_ptr()
        call_library("prescore_routed_forward", call)
        return Attended(output.to(value.dtype), lse), self._counts[1] / (n_lanes * group)

    def _check(self, query: Tensor, key: Tensor, value: Tensor, n_nodes: int, first: int) -> None:
        """Refuse whatever compiled code could read outside of: it checks nothing itself."""
        tables, n_keys = self._tables, key.shape[-2]
        n_lanes, dim, wide = tables.sizes
        check_row_tensor("query", query, n_lanes * query.shape[1])
        check_lanes(key, value, n_lanes, tables.rows.shape[2])
        sizes = (query.shape[0], query.shape[2], query.shape[-1], key.shape[-1], value.shape[-1])
        if sizes != (n_lanes, 1, dim, dim, wide):
            raise ValueError(f"a step must be of {n_lanes} lanes of {dim} and {wide} numbers, got {sizes}")
        if tables.row_stop > n_keys:
            raise ValueError(f"tables must be of {n_keys} keys, got rows up to {tables.row_stop}")
        if not 0 < n_nodes <= tables.nodes or tables.pools != 1:
            raise ValueError(f"visible nodes must lie between 1 and {tables.nodes}, got {n_nodes}")
        if not 0 <= first <= n_keys:
            raise ValueError(f"near rows must lie within {n_keys} keys, got {first} to {n_keys}")
