"""Routed attention to a tolerance: what is left of a node is sampled instead of modelled, and queries read on.

Every node is searched, and one key of every sixteen of a node (its odd keys, then the others in tree order) stands
for those that are not read by themselves: a nearly unbiased estimate with a measured spread, where the bias of a
stand-in could not be known. The samples come first, and say how light the keys must be that a query looks for; one
whose error bar is too wide all the same looks again for lighter ones. A query that no search serves, or that is
over the tolerance at last, reads everything. Which keys are sampled depends on the seed and on their node's number
alone: draws are the same in pieces of a prompt, in single steps, and in any batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from prescore.config import Routed
from prescore.routed.compiled.far import attend_near_compiled, can_run
from prescore.routed.compiled.sampled import attend_sampled_compiled
from prescore.routed.far import Search
from prescore.routed.local import attend_near
from prescore.routed.sources import Draws, Sources, View
from prescore.routed.tolerance.draws import sample_places
from prescore.routed.tolerance.error_bar import error_limit, estimated_error, longest_error, of_single_query
from prescore.routed.tolerance.exact_rows import read_everything
from prescore.routed.tolerance.plain import attend_sampled_plain
from prescore.types import Attended

LOOKS = 2
"""Searches of a query, before everything is read."""
AIMED_AT = 0.9
"""Part of the tolerance that a search aims at, where a guess says how light its keys must be."""
DIRECTIONS, FREEDOM = 6.0, 40.0
"""What the guess believes about errors: in how many directions they point, and how well their spread is known."""
MOST_LIGHTER = 32.0
"""How many times lighter the keys of another look may be."""

CONFIDENCE = 0.95
"""Where none is asked for."""


class Within(NamedTuple):
    """A result with its error bars; all but the first two and the last are `[T, G, Q]`.

    Attributes:
        output, lse: The result.
        limit: Relative error that each query stays below, as often as `of_single_query` has it.
        error: The error that is expected of it, a root mean square over draws.
        further: Whether it looked for lighter keys than in any case.
        counts: Keys searched, rows read, by all queries.
    """

    output: Tensor
    lse: Tensor
    limit: Tensor
    error: Tensor
    further: Tensor
    counts: Tensor


def attend_to_tolerance(query: Tensor, sources: Sources, view: View, config: Routed, seed: int) -> Within:
    """Queries `[T, G, Q, D]` with their error bars, by the configuration's tolerance and confidence.

    Those whose bar is still above the tolerance have read everything.
    """
    attend = attend_near_compiled if can_run(query, sources, view) else attend_near
    near = attend(query, sources, view)
    bars = attend_within(query, sources, view, near, config, seed)
    read_everything(query, sources, view, near, is_over(bars.limit, config), Attended(bars.output, bars.lse))
    return bars._replace(output=bars.output.to(query.dtype))


def is_over(limit: Tensor, config: Routed) -> Tensor:
    """Which error bars are above the tolerance."""
    return ~(limit <= (config.tolerance or 0.0))


def attend_within(
    query: Tensor, sources: Sources, view: View, near: Attended, config: Routed, seed: int
) -> Within:
    """Attend such that every error bar is within the tolerance, as far as looking for lighter keys gets.

    Args:
        query: `[T, G, Q, D]`.
        sources: What they see.
        view: How they see it; its search is what is looked for in any case.
        near: What they read in any case.
        config: Its tolerance and confidence.
        seed: Of the draws.
    """
    tolerance = config.tolerance or 0.0
    confidence = of_single_query(CONFIDENCE if config.confidence is None else config.confidence)
    attend = attend_sampled_compiled if can_run(query, sources, view) else attend_sampled_plain
    view = replace(view, search=Search(max(1.0, view.search.share)))
    places = sample_places(sources.rows.shape[1], sources.rows.shape[2], seed, query.device)
    directions, freedom = torch.tensor((DIRECTIONS, FREEDOM), dtype=torch.float32)
    guessed = longest_error(directions, freedom, confidence)
    allowed = float(AIMED_AT * tolerance / guessed) ** 2
    aim, again = torch.full_like(near.lse, torch.inf), torch.ones_like(near.lse, dtype=torch.bool)
    whole, counts = attend(query, sources, view, near, Draws(places, again, aim, allowed))
    limit, error = error_limit(whole, confidence), estimated_error(whole)
    for _ in range(LOOKS - 1):
        # the variance falls as fast as the weight from which on keys are read
        lighter = (limit / (AIMED_AT * tolerance)).square() if tolerance else torch.full_like(limit, torch.inf)
        again = (limit > tolerance) & (lighter <= MOST_LIGHTER)
        if not bool(again.any()):
            break
        aim = whole.limit - lighter.clamp(2.0, MOST_LIGHTER).log()
        found, more = attend(query, sources, view, near, Draws(places, again, aim, allowed))
        counts += more
        bars = error_limit(found, confidence), estimated_error(found)
        for kept, part in zip((*whole, limit, error), (*found, *bars), strict=True):
            kept[again] = part[again]
    return Within(whole.output, whole.lse, limit, error, whole.further, counts)
