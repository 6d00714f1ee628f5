# SPDX-License-Identifier: Apache-2.0
"""Bytes that tell where they belong, and where a side keeps its rows, by counting positions."""

from __future__ import annotations

from typing import Any, Iterator, List, Sequence, Tuple

import numpy as np

import kvpack


def row_bytes(key: int, layer: int, position: int, nbytes: int) -> Any:
    """The row of a token: nothing but these three numbers gives the same bytes."""
    seed = np.random.SeedSequence([key, layer, position])
    return np.random.Generator(np.random.SFC64(seed)).integers(0, 256, nbytes, np.uint8)


def rows_of(side: kvpack.Side, start: int, end: int) -> Iterator[Tuple[int, int, int]]:
    """(position, page, slot) of the rows of [start, end) that the side's rank owns.

    It counts: a position takes the next slot of its owner in its virtual page.
    """
    width = side.page * side.dcp_size
    counts: List[int] = []
    for position in range(side.pos0, end):
        if position % width == 0:
            counts = [0] * side.dcp_size
        owner = position // side.interleave % side.dcp_size
        slot, counts[owner] = counts[owner], counts[owner] + 1
        if owner == side.dcp_rank and position >= start:
            yield position, side.pages[(position - side.pos0) // width], slot


def replicated(side: kvpack.Side) -> kvpack.Side:
    """The same for entries of which each rank has every row."""
    return kvpack.Side(side.page * side.dcp_size, side.pages, side.pos0)


def put_rows(
    array: Any, key: int, layer: int, side: kvpack.Side, start: int, end: int
) -> None:
    """Writes the rows into an array of shape [pages, slots, bytes]."""
    for position, page, slot in rows_of(side, start, end):
        array[page, slot] = row_bytes(key, layer, position, array.shape[2])


def some_pages(n: int, pool: int, seed: int) -> Sequence[int]:
    """n different page numbers in random order; page 0 is nobody's."""
    return (1 + np.random.default_rng(seed).permutation(pool - 1)[:n]).tolist()
