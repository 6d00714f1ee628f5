# SPDX-License-Identifier: Apache-2.0
"""Rooms: what is asked for, what is sent, and how far it is."""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Iterable, List, Optional, Sequence, Tuple, Type, Union

import numpy as np

from . import _abi
from .errors import InvalidError, KvpackError, Status, error_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from .client import Client, Done
    from .fence import FencePoint
    from .pool import Pool

    Pages = Union[Sequence[int], npt.NDArray[Any]]


class Phase(enum.IntEnum):
    """Where an end is; decide by the flags of RoomState, show the phase."""

    NONE = 0
    WAITING = 1
    READY = 2
    SENDING = 3
    CLOSING = 4
    DONE = 5
    FAILED = 6
    GONE = 7
    OFFERING = 8
    ACCEPTED = 9
    LANDING = 10
    COMPLETE = 11
    RELEASED = 12


class Role(enum.IntEnum):
    """What a sender does for a destination."""

    DATA = 0
    NONE = 1


@dataclass(frozen=True)
class Side:
    """How one end sees the tokens of a group.

    ``page``: tokens of a page of this rank. ``pages``: page numbers from position ``pos0`` on, one
    for each page * dcp_size tokens; not needed by Open.
    """

    page: int
    pages: "Pages" = ()
    pos0: int = 0
    dcp_size: int = 1
    dcp_rank: int = 0
    interleave: int = 1
    first: int = 0
    group: int = 0


@dataclass(frozen=True)
class Sender:
    """A sender that an expectation names; ``address``: Client.node_address on its node."""

    address: str
    sender: int = 0
    n_dests: int = 1
    role: Role = Role.DATA


@dataclass(frozen=True)
class Segment:
    """Bytes of a blob entry. ``id`` is chosen by the engines, ``bytes`` equal at both ends."""

    id: int
    entry: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class Timers:
    """Milliseconds; 0: the daemon's. Only shorter ones are honoured."""

    offer_ms: int = 0
    open_ms: int = 0
    progress_ms: int = 0
    fence_ms: int = 0
    lease_ms: int = 0


@dataclass(frozen=True)
class Expect:
    """Decode's side of a room: where tokens [prefix, end) have to go."""

    room: int
    pool: "Pool"
    sides: Sequence[Side]
    senders: Sequence[Sender]
    end: int
    prefix: int = 0
    dest: int = 0
    key: Optional[bytes] = None
    segments: Sequence[Segment] = ()
    meta_from: int = -1
    label: Optional[str] = None
    timers: Timers = field(default_factory=Timers)


@dataclass(frozen=True)
class Open:
    """Prefill's side of a room. ``entries``: numbers of those that take part; None: all."""

    room: int
    pool: "Pool"
    sides: Sequence[Side]
    sender: int = 0
    key: Optional[bytes] = None
    entries: Optional[Iterable[int]] = None
    label: Optional[str] = None
    timers: Timers = field(default_factory=Timers)


@dataclass(frozen=True)
class Chunk:
    """A token range of a sender. ``fence``: None says that the rows are ready now."""

    start: int
    tokens: int
    sides: Sequence[Side] = ()
    entries: Optional[Iterable[int]] = None
    fence: "Optional[FencePoint]" = None
    last: bool = False
    segments: Sequence[Segment] = ()
    meta: bytes = b""


@dataclass(frozen=True)
class RoomState:
    """What is known of a room's end now. ``complete``, ``failed``, ``released`` are sticky."""

    phase: Phase
    complete: bool
    failed: bool
    released: bool
    source_free: int
    delivered: int
    arrived: int
    prefix: int
    end: int
    status: Status
    retry: bool
    reason: str
    meta: bytes

    @property
    def terminal(self) -> bool:
        return self.complete or self.failed

    def raise_if_failed(self) -> None:
        """Raises the exception of the status when the room has failed."""
        if self.failed:
            raise error_of(self.status, self.reason, retry=self.retry)


class Room:
    """One end of a room. As a context manager it is forgotten at the end (aborted if it lives)."""

    def __init__(self, client: "Client", ident: int, room: int) -> None:
        self.client = client
        self.id = ident
        self.room = room

    @property
    def state(self) -> RoomState:
        """What is known now: never blocks, never goes backwards."""
        return self.client._room_state(self.id)

    # ---- prefill

    def submit(self, chunk: Chunk, done: "Optional[Done]" = None) -> int:
        """Submits the next chunk, and returns its number.

        The rows must not change until ``state.source_free`` is larger. Without ``done`` it waits
        for the daemon's answer; with it, done(error or None) is called later by process().
        """
        packed = PackedChunk(chunk)
        seq = ctypes.c_uint32()
        self.client._request(
            "kvp_submit", self.id, ctypes.byref(packed.c), done=done, out=ctypes.byref(seq)
        )
        return seq.value

    def recall(self, seq: int) -> int:
        """Withdraws chunks from seq on that are not packed yet; returns the first withdrawn."""
        first = ctypes.c_uint32()
        self.client._call("kvp_recall", self.id, seq, ctypes.byref(first))
        return first.value

    def wait_ready(self, timeout: Optional[float] = None) -> RoomState:
        """Until all destinations are there (decode: all senders). Raises when the room failed."""
        return self._wait(_abi.WAIT_READY, timeout)

    def wait_source_free(self, chunks: int, timeout: Optional[float] = None) -> RoomState:
        """Until the first ``chunks`` chunks may be overwritten; also after a failure."""
        self.client._wait_call("kvp_room_wait_source_free", timeout, self.id, chunks)
        return self.state

    def wait_delivered(self, chunks: int, timeout: Optional[float] = None) -> RoomState:
        """Until the first ``chunks`` chunks have landed at every destination."""
        try:
            self.client._wait_call("kvp_room_wait_delivered", timeout, self.id, chunks)
        except KvpackError:
            self.state.raise_if_failed()
            raise
        return self.state

    # ---- both

    def wait(self, timeout: Optional[float] = None) -> RoomState:
        """Until the room is complete. Raises when it failed."""
        return self._wait(_abi.WAIT_TERMINAL, timeout)

    def wait_released(self, timeout: Optional[float] = None) -> RoomState:
        """Until pages (decode) or sources (prefill) may be reused, also after a failure."""
        self.client._wait_call("kvp_room_wait", timeout, self.id, _abi.WAIT_RELEASED)
        return self.state

    def _wait(self, what: int, timeout: Optional[float]) -> RoomState:
        self.client._wait_call("kvp_room_wait", timeout, self.id, what)
        state = self.state
        state.raise_if_failed()
        return state

    def abort(self, reason: str = "") -> None:
        """Ends this end without success; harmless when it is over."""
        self.client._call("kvp_abort", self.id, reason.encode())

    def forget(self) -> None:
        """Frees the record; a live room is aborted first."""
        self.client._forget(self.id)

    def __enter__(self) -> "Room":
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.forget()

    def __repr__(self) -> str:
        return f"<kvpack.Room {self.room}, end {self.id}>"


# ---- to C: each class holds the struct, `c`, and what it points to -------------------------------


def _text(text: Optional[str]) -> Optional[bytes]:
    return None if text is None else text.encode()


def _key(key: Optional[bytes]) -> Optional[bytes]:
    if key is not None and len(key) != _abi.KEY_BYTES:
        raise InvalidError(f"key has {len(key)} bytes, not {_abi.KEY_BYTES}")
    return key


def _mask(entries: Optional[Iterable[int]]) -> Tuple[Optional[bytes], int]:
    if entries is None:
        return None, 0
    numbers = sorted(set(entries))
    if numbers and not 0 <= numbers[0] <= numbers[-1] < 512:
        raise InvalidError(f"entry {numbers[-1]}: entries are 0 to 511")
    mask = bytearray(numbers[-1] // 8 + 1 if numbers else 1)
    for number in numbers:
        mask[number // 8] |= 1 << number % 8
    return bytes(mask), len(mask)


def _timers(timers: Timers) -> _abi.kvp_timers:
    return _abi.kvp_timers(
        timers.offer_ms, timers.open_ms, timers.progress_ms, timers.fence_ms, timers.lease_ms
    )


class _Sides:
    def __init__(self, sides: Sequence[Side]) -> None:
        self.lists: List[npt.NDArray[np.uint32]] = []
        self.c = (_abi.kvp_side_desc * max(len(sides), 1))()
        for desc, side in zip(self.c, sides):
            pages = np.ascontiguousarray(side.pages, dtype=np.uint32)
            self.lists.append(pages)
            desc.group, desc.page = side.group, side.page
            desc.dcp_size, desc.dcp_rank = side.dcp_size, side.dcp_rank
            desc.interleave, desc.pos0, desc.first = side.interleave, side.pos0, side.first
            desc.n_pages = len(pages)
            desc.pages = pages.ctypes.data if len(pages) else None


def _segments(segments: Sequence[Segment]) -> Any:
    array = (_abi.kvp_segment * max(len(segments), 1))()
    for desc, segment in zip(array, segments):
        desc.id, desc.entry = segment.id, segment.entry
        desc.offset, desc.bytes = segment.offset, segment.bytes
    return array


class PackedExpect:
    """An Expect as ``struct kvp_expect``."""

    def __init__(self, expect: Expect) -> None:
        self._sides = _Sides(expect.sides)
        self._segments = _segments(expect.segments)
        self._senders = (_abi.kvp_expect_sender * max(len(expect.senders), 1))()
        for desc, sender in zip(self._senders, expect.senders):
            desc.address, desc.sender = sender.address.encode(), sender.sender
            desc.n_dests, desc.role = sender.n_dests, sender.role
        self.c = c = _abi.kvp_expect(size=ctypes.sizeof(_abi.kvp_expect))
        c.room, c.key, c.dest, c.pool = expect.room, _key(expect.key), expect.dest, expect.pool.id
        c.sides, c.n_sides = self._sides.c, len(expect.sides)
        c.segments, c.n_segments = self._segments, len(expect.segments)
        c.senders, c.n_senders = self._senders, len(expect.senders)
        c.meta_from, c.prefix, c.end = expect.meta_from, expect.prefix, expect.end
        c.label, c.timers = _text(expect.label), _timers(expect.timers)


class PackedOpen:
    """An Open as ``struct kvp_open``."""

    def __init__(self, open_: Open) -> None:
        self._sides = _Sides(open_.sides)
        self.c = c = _abi.kvp_open(size=ctypes.sizeof(_abi.kvp_open))
        c.room, c.key, c.sender, c.pool = open_.room, _key(open_.key), open_.sender, open_.pool.id
        c.sides, c.n_sides = self._sides.c, len(open_.sides)
        c.entry_mask, c.mask_bytes = _mask(open_.entries)
        c.label, c.timers = _text(open_.label), _timers(open_.timers)


class PackedChunk:
    """A Chunk as ``struct kvp_chunk``."""

    def __init__(self, chunk: Chunk) -> None:
        self._sides = _Sides(chunk.sides)
        self._segments = _segments(chunk.segments)
        self.c = c = _abi.kvp_chunk(size=ctypes.sizeof(_abi.kvp_chunk))
        c.start, c.tokens, c.last = chunk.start, chunk.tokens, chunk.last
        c.sides, c.n_sides = self._sides.c, len(chunk.sides)
        c.entry_set, c.set_bytes = _mask(chunk.entries)
        if chunk.fence is not None:
            c.fence = chunk.fence.fence._handle
            c.fence_word, c.fence_value = chunk.fence.word, chunk.fence.value
        c.segments, c.n_segments = self._segments, len(chunk.segments)
        if len(chunk.meta) > _abi.MAX_META:
            raise InvalidError(f"meta has {len(chunk.meta)} bytes, at most {_abi.MAX_META}")
        c.meta, c.meta_bytes = chunk.meta, len(chunk.meta)


def state_of(c: _abi.kvp_room_state) -> RoomState:
    """A RoomState of what the library filled in."""
    try:
        status = Status(c.status)
    except ValueError:  # newer than this package; the reason says it in words
        status = Status.SYSTEM
    return RoomState(
        phase=Phase(c.phase),
        complete=bool(c.complete),
        failed=bool(c.failed),
        released=bool(c.released),
        source_free=c.source_free,
        delivered=c.delivered,
        arrived=c.arrived,
        prefix=c.prefix,
        end=c.end,
        status=status,
        retry=bool(c.retry),
        reason=(c.reason or b"").decode(errors="replace"),
        meta=ctypes.string_at(c.meta, c.meta_bytes) if c.meta else b"",
    )
