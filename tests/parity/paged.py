# SPDX-License-Identifier: Apache-2.0
"""Caches of one rank as an engine lays them out: pages, in memory that the daemon maps."""

from __future__ import annotations

from typing import Any, Dict, Sequence, Tuple

import numpy as np

import kvpack
import model
from model import State

Array = Any

SLOTS = 3  # requests whose recurrent state is kept
GAP = 64  # bytes between the pages of a layer that belong to nobody


class Caches:
    """Row arrays of some layers, draft rows, and state slots; registered as one pool.

    place: where they are, one of arrays.PLACES. width: tokens of a page of draft rows (they are
    replicated): page, or page * dcp_size.
    """

    def __init__(
        self,
        client: kvpack.Client,
        place: Any,
        fmt: Any,
        layers: Sequence[int],
        n_pages: int,
        page: int,
        width: int,
        with_draft: bool,
    ) -> None:
        self.fmt, self.page = fmt, page
        mla = [layer for layer in layers if layer in model.MLA_LAYERS]
        recurrent = [layer for layer in layers if layer in model.STATE_LAYERS]
        state_bytes = self._state_bytes = 8 * (model.KEYS + model.TAPS) * model.KEYS
        page_bytes = page * fmt.row_bytes + GAP
        need = len(mla) * n_pages * page_bytes + n_pages * width * fmt.row_bytes
        need += len(recurrent) * SLOTS * state_bytes + 16 * kvpack.memory.ALIGN
        memory = place(need)
        self.rows: Dict[int, Array] = {
            layer: memory.rows(n_pages, page_bytes, page, fmt.row_bytes) for layer in mla
        }
        self.draft: Dict[int, Array] = {}
        if with_draft:
            self.draft[model.DRAFT] = memory.take((n_pages, width, fmt.row_bytes))
        shape = (SLOTS, model.KEYS + model.TAPS, model.KEYS)
        self.states = {layer: memory.take(shape, "float64") for layer in recurrent}
        for array in [*self.rows.values(), *self.draft.values()]:
            array[:] = 0x7B  # what is not written is not harmless
        self.pool = kvpack.Pool.from_arrays(
            client,
            {layer: place.entry(array) for layer, array in self.rows.items()},
            page_size=page,
            replicated={layer: place.entry(array) for layer, array in self.draft.items()},
            blobs={layer: place.entry(array) for layer, array in self.states.items()},
            tag=fmt.name.encode(),
        )
        first = len(self.rows) + len(self.draft)
        self._state_entries = {layer: first + i for i, layer in enumerate(recurrent)}

    def segments(self, slot: int) -> "list[kvpack.Segment]":
        """The state of a request; ids are layers, so that stages need not know of each other."""
        return [
            kvpack.Segment(layer, entry, slot * self._state_bytes, self._state_bytes)
            for layer, entry in self._state_entries.items()
        ]

    def state(self, layer: int, slot: int) -> State:
        array = self.states[layer][slot]
        return State(array[: model.KEYS].copy(), array[model.KEYS :].copy())

    def set_state(self, layer: int, slot: int, state: State) -> None:
        self.states[layer][slot] = np.ascontiguousarray(np.vstack(state))


class Table:
    """Where the rows of one request are at a rank: the block table and the rank's share."""

    def __init__(
        self, pages: Sequence[int], page: int, dcp_size: int, dcp_rank: int, interleave: int
    ) -> None:
        self.pages = np.array(pages)
        self.page, self.size, self.rank, self.interleave = page, dcp_size, dcp_rank, interleave
        self.width = page * dcp_size

    def owned(self, start: int, end: int) -> Array:
        """Positions of [start, end) that this rank has."""
        positions = np.arange(start, end)
        return positions[positions // self.interleave % self.size == self.rank]

    def place(self, positions: Array) -> Tuple[Array, Array]:
        """(page, slot) of owned positions."""
        inside = positions % self.width
        turn = self.interleave * self.size
        slot = inside // turn * self.interleave + inside % self.interleave
        return self.pages[positions // self.width], slot

    def place_all(self, positions: Array) -> Tuple[Array, Array]:
        """The same in an array of which each rank has every row."""
        return self.pages[positions // self.width], positions % self.width
