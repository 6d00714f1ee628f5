# SPDX-License-Identifier: Apache-2.0
"""How SGLang's disaggregation calls kvpack: decode announces pages first, prefill sends chunks.

KVManager, KVSender, KVReceiver have the methods that the engine calls, in the order of
docs/engines.md, section 2. Router, bootstrap server, and rank mapping stay the engine's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence

import kvpack


class KVPoll(enum.IntEnum):
    """What the engine reduces (MIN) over its ranks."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


_POLL = {
    kvpack.Phase.WAITING: KVPoll.Bootstrapping,
    kvpack.Phase.READY: KVPoll.WaitingForInput,
    kvpack.Phase.OFFERING: KVPoll.WaitingForInput,
    kvpack.Phase.ACCEPTED: KVPoll.WaitingForInput,
    kvpack.Phase.SENDING: KVPoll.Transferring,
    kvpack.Phase.CLOSING: KVPoll.Transferring,
    kvpack.Phase.LANDING: KVPoll.Transferring,
}


def poll_of(state: kvpack.RoomState) -> KVPoll:
    """Flags decide, they are sticky; the phase only says what is left."""
    if state.failed:
        return KVPoll.Failed
    if state.complete:
        return KVPoll.Success
    return _POLL[state.phase]


@dataclass
class KVArgs:
    """A rank's caches, as the engine allocated them in kvpack.Memory."""

    page_size: int  # P, of the pool: not the virtual page
    kv: Dict[int, Any]  # by global layer id: [pages, P, row]
    draft: Dict[int, Any] = field(default_factory=dict)  # prefill [pages, P, row], DCP decode W
    state: Dict[int, Any] = field(default_factory=dict)  # recurrent state: [slots, bytes]


class KVManager:
    """One for each rank, for the engine's life."""

    def __init__(self, socket: str, args: KVArgs, name: str) -> None:
        self.client = kvpack.Client(socket, name=name)
        self.args = args
        self.pool = kvpack.Pool.from_arrays(
            self.client,
            args.kv,
            page_size=args.page_size,
            replicated=args.draft,
            blobs=args.state,
            tag=b"demo model, fp8",
            label=name,
        )
        # Blobs come last; a segment names its entry by number.
        first = len(args.kv) + len(args.draft)
        self.state_entries = {layer: first + i for i, layer in enumerate(args.state)}

    def register_to_bootstrap(self) -> str:
        """The address that this rank adds to what it registers."""
        return self.client.node_address

    def state_segments(self, base: int, slot: int) -> List[kvpack.Segment]:
        """A request's recurrent state; both ends number the arrays alike, from base on."""
        segments = []
        for i, (layer, entry) in enumerate(self.state_entries.items()):
            size = self.args.state[layer][0].nbytes
            segments.append(kvpack.Segment(base + i, entry, slot * size, size))
        return segments

    def close(self) -> None:
        self.client.close()


class _Common:
    def __init__(self, mgr: KVManager, room: int) -> None:
        self.mgr = mgr
        self.room_id = room
        self.room: Optional[kvpack.Room] = None

    def _room(self) -> kvpack.Room:
        assert self.room is not None, "no room yet"
        return self.room

    def poll(self) -> KVPoll:
        """Never blocks; all progress is the daemons'."""
        self.mgr.client.process()
        return poll_of(self._room().state) if self.room else KVPoll.Bootstrapping

    def failure_exception(self) -> None:
        self._room().state.raise_if_failed()

    def abort(self) -> None:
        self._room().abort("the request was cancelled")

    def is_released(self) -> bool:
        """After a failure: may pages (decode) or sources (prefill) be used again?"""
        self.mgr.client.process()
        return self._room().state.released

    def clear(self) -> None:
        if self.room:
            self.room.forget()
            self.room = None


class KVSender(_Common):
    """A request at a prefill rank."""

    def __init__(self, mgr: KVManager, room: int, sender: int) -> None:
        super().__init__(mgr, room)
        self.sender = sender
        self.sent = 0  # chunks
        side = kvpack.Side(page=mgr.args.page_size)
        self.room = mgr.client.open(
            kvpack.Open(room, mgr.pool, [side], sender=sender, label=f"request {room}")
        )
        self.position = 0

    def pop_decode_prefix_len(self) -> int:
        """From WaitingForInput on: the tokens that decode has already. Sending starts there."""
        self.position = self._room().state.prefix
        return self.position

    def send(
        self,
        pages: Sequence[int],
        tokens: int,
        fence: Optional[kvpack.FencePoint] = None,
        *,
        last: bool = False,
        state_slot: Optional[int] = None,
        aux: bytes = b"",
    ) -> None:
        """The next tokens, in these pages; the first page holds the current position.

        With a fence the rows need not be written yet: the daemon waits for it. State and aux rows
        go with the last chunk.
        """
        page = self.mgr.args.page_size
        side = kvpack.Side(page=page, pages=pages, pos0=self.position // page * page)
        segments = []
        if state_slot is not None:
            segments = self.mgr.state_segments(100 * self.sender, state_slot)
        chunk = kvpack.Chunk(
            start=self.position,
            tokens=tokens,
            sides=[side],
            fence=fence,
            last=last,
            segments=segments,
            meta=aux,
        )
        self.position += tokens
        try:
            self._room().submit(chunk)
        except kvpack.KvpackError:
            # A dummy does not know that it is one: decode may be complete without it.
            if self.poll() != KVPoll.Success:
                raise
        else:
            self.sent += 1

    def sources_free(self) -> bool:
        """May the pages of all sent chunks be used again? Often long before Success."""
        self.mgr.client.process()
        return self._room().state.source_free >= self.sent


@dataclass(frozen=True)
class Source:
    """A prefill rank that a decode rank hears of, by the engine's rank mapping."""

    address: str
    sender: int
    n_dests: int = 1  # required_dst_info_num: how many decode ranks that rank has to hear from
    dummy: bool = False  # another rank sends the same rows
    has_state: bool = False  # the pipeline stage with recurrent state and aux rows


class KVReceiver(_Common):
    """A request at a decode rank."""

    def __init__(
        self, mgr: KVManager, room: int, dest: int, sources: Sequence[Source], dcp_size: int
    ) -> None:
        super().__init__(mgr, room)
        self.dest = dest
        self.sources = sources
        self.dcp_size = dcp_size

    def send_metadata(
        self, pages: Sequence[int], prefix: int, end: int, state_slot: Optional[int] = None
    ) -> None:
        """Announces the pages of [prefix, end): virtual pages, one list for all ranks."""
        side = kvpack.Side(
            page=self.mgr.args.page_size,
            pages=pages,
            pos0=prefix,
            dcp_size=self.dcp_size,
            dcp_rank=self.dest % self.dcp_size,
        )
        segments: List[kvpack.Segment] = []
        meta_from = -1
        for source in self.sources:
            if source.has_state and not source.dummy:
                meta_from = source.sender
                if state_slot is not None:
                    segments += self.mgr.state_segments(100 * source.sender, state_slot)
        self.room = self.mgr.client.expect(
            kvpack.Expect(
                self.room_id,
                self.mgr.pool,
                [side],
                senders=[
                    kvpack.Sender(
                        source.address,
                        source.sender,
                        source.n_dests,
                        kvpack.Role.NONE if source.dummy else kvpack.Role.DATA,
                    )
                    for source in self.sources
                ],
                prefix=prefix,
                end=end,
                dest=self.dest,
                segments=segments,
                meta_from=meta_from,
                label=f"request {self.room_id}",
            )
        )

    def aux(self) -> bytes:
        """From Success on: what the sender with the aux rows gave."""
        return self._room().state.meta
