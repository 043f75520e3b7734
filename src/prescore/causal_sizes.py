"""Sizes of the causal recursion, for whoever reads a budget against them; imports no torch."""

from __future__ import annotations


def largest_block(length: int, leaf: int) -> int:
    """Keys of the largest off-diagonal block: leaves double until twice as many would reach past the last query.

    A budget of as many keys filters nothing, so that all scorers give one result. 0 = everything is in one leaf.
    """
    block = leaf
    while 2 * block < length:
        block *= 2
    return block if block < length else 0
