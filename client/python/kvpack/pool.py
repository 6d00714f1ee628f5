# SPDX-License-Identifier: Apache-2.0
"""Entries and pools: what an engine rank registers."""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, List, Mapping, Optional, Sequence, Tuple, Type, Union

from . import _abi
from .errors import InvalidError
from .memory import AnyMemory, Layout, layout_of, memory_of

if TYPE_CHECKING:
    from .client import Client, Done

    Layers = Union[Sequence[Any], Mapping[int, Any]]


class EntryClass(enum.IntEnum):
    """How the tokens of an entry are spread over the ranks of a DCP group."""

    SHARDED = 0
    REPLICATED = 1
    BLOB = 2


@dataclass(frozen=True)
class Entry:
    """One array of a pool; see ``struct kvp_entry_desc``. Sizes and strides are in bytes."""

    layer: int
    memory: AnyMemory
    offset: int
    bytes: int
    klass: EntryClass = EntryClass.SHARDED
    group: int = 0
    page_stride: int = 0
    row_stride: int = 0
    row_bytes: int = 0
    lo: int = 0
    full_bytes: int = 0
    rows_per_page: int = 0
    n_pages: int = 0

    @classmethod
    def rows(
        cls,
        array: Any,
        layer: int,
        *,
        klass: EntryClass = EntryClass.SHARDED,
        group: int = 0,
        lo: int = 0,
        full_bytes: int = 0,
    ) -> "Entry":
        """Rows of a layer in an array (or tensor, or a view) of shape [pages, tokens, ...].

        Strides between pages and rows are the array's own; the bytes of one row must be dense.
        A row is bytes [lo, lo + its size) of a full row of full_bytes (0: it is the full row).

        >>> from kvpack import Entry, alloc
        >>> kv, _ = alloc((8, 16, 2, 576))         # two layers, interleaved token by token
        >>> Entry.rows(kv[:, :, 1], layer=1).row_stride
        1152
        """
        lay = layout_of(array)
        if len(lay.shape) < 2:
            raise InvalidError(f"shape {lay.shape}: rows need [pages, tokens, ...]")
        memory = memory_of(array)
        row_bytes = _dense_bytes(lay)
        return cls(
            layer=layer,
            memory=memory,
            offset=lay.address - memory.address,
            bytes=lay.end - lay.address,
            klass=klass,
            group=group,
            page_stride=lay.strides[0],
            row_stride=lay.strides[1],
            row_bytes=row_bytes,
            lo=lo,
            full_bytes=full_bytes or row_bytes,
            rows_per_page=lay.shape[1],
            n_pages=lay.shape[0],
        )

    @classmethod
    def blob(cls, array: Any, layer: int, *, group: int = 0) -> "Entry":
        """Bytes without rows, reached by segments: recurrent state, request slots."""
        lay = layout_of(array)
        memory = memory_of(array)
        offset, size = lay.address - memory.address, lay.end - lay.address
        return cls(layer, memory, offset, size, EntryClass.BLOB, group)

    def _desc(self, mem: int) -> _abi.kvp_entry_desc:
        return _abi.kvp_entry_desc(
            self.layer,
            self.klass,
            self.group,
            mem,
            self.offset,
            self.bytes,
            self.page_stride,
            self.row_stride,
            self.row_bytes,
            self.lo,
            self.full_bytes,
            self.rows_per_page,
            self.n_pages,
        )


def _dense_bytes(lay: Layout) -> int:
    size = lay.itemsize
    for n, stride in zip(reversed(lay.shape[2:]), reversed(lay.strides[2:])):
        if n > 1 and stride != size:
            raise InvalidError(f"the bytes of a row are not dense: strides {lay.strides}")
        size *= n
    return size


class Pool:
    """All entries that a rank registered. As a context manager it unregisters at the end."""

    def __init__(self, client: "Client", ident: int, entries: Sequence[Entry]) -> None:
        self.client = client
        self.id = ident
        self.entries: Tuple[Entry, ...] = tuple(entries)

    @classmethod
    def from_arrays(
        cls,
        client: "Client",
        layers: "Layers",
        *,
        page_size: int,
        replicated: "Layers" = (),
        blobs: "Layers" = (),
        tag: bytes = b"",
        label: Optional[str] = None,
    ) -> "Pool":
        """Registers one entry for each array.

        ``layers``: row arrays by layer id (a list counts from 0) of shape [pages, page_size, ...]
        or [pages * page_size, ...]. ``replicated``: draft KV that every DCP rank holds whole, of
        shape [pages, tokens, ...]; ``blobs``: anything that segments reach. The entries are in
        that order; ``tag`` must be equal at both ends.
        """
        entries = [Entry.rows(_paged(a, page_size), layer) for layer, a in _numbered(layers)]
        for layer, array in _numbered(replicated):
            entries.append(Entry.rows(array, layer, klass=EntryClass.REPLICATED))
        entries += [Entry.blob(array, layer) for layer, array in _numbered(blobs)]
        return client.register(entries, tag=tag, label=label)

    def pause(self, done: "Optional[Done]" = None) -> None:
        """Stops all use of the memory: rooms fail, the daemon unmaps, then answers."""
        self.client._request("kvp_pool_pause", self.id, done=done)

    def resume(self, memories: Optional[Sequence[AnyMemory]] = None) -> None:
        """The same geometry again, in the same or in new memory (one for each distinct one)."""
        mems = mems_of(memories or distinct(self.entries))
        self.client._call("kvp_pool_resume_mems", self.id, mems, len(mems))

    def unregister(self, done: "Optional[Done]" = None) -> None:
        """Forgets the pool; when it is answered the memory is the caller's alone."""
        self.client._request("kvp_pool_unregister", self.id, done=done)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if not self.client.closed:
            self.unregister()

    def __repr__(self) -> str:
        return f"<kvpack.Pool {self.id}, {len(self.entries)} entries>"


def mems_of(memories: "Sequence[AnyMemory]") -> "ctypes.Array[_abi.kvp_mem]":
    """Memories as the library takes them."""
    return (_abi.kvp_mem * len(memories))(*[memory._c() for memory in memories])


def distinct(entries: Sequence[Entry]) -> List[AnyMemory]:
    """The memories of entries, each once, in the order in which the daemon numbers them."""
    return list(dict.fromkeys(entry.memory for entry in entries))


def _numbered(arrays: "Layers") -> List[Tuple[int, Any]]:
    return list(arrays.items()) if isinstance(arrays, Mapping) else list(enumerate(arrays))


def _paged(array: Any, page_size: int) -> Any:
    shape = tuple(array.shape)
    if len(shape) > 2 and shape[1] == page_size:
        return array
    if shape[0] % page_size:
        raise InvalidError(
            f"shape {shape}: neither [pages, {page_size}, ...] nor [n * {page_size}, ...]"
        )
    # Splitting the first axis never copies.
    return array.reshape((shape[0] // page_size, page_size) + shape[1:])
