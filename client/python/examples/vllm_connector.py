# SPDX-License-Identifier: Apache-2.0
"""How vLLM's connector calls kvpack: prefill submits first, decode comes later, or never.

Scheduler and Worker are the two halves of a connector, with the methods that the engine calls
in the order of docs/engines.md, section 3.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import kvpack

LEASE_MS = 30000


@dataclass(frozen=True)
class Group:
    """A KV cache group: layers that share a block table. ``window``: 0 is all tokens."""

    block_size: int
    caches: Dict[int, Any]  # by layer: [blocks, block_size, bytes]
    window: int = 0


@dataclass(frozen=True)
class Parallel:
    """This rank in its engine."""

    tp_rank: int = 0
    dcp_size: int = 1
    interleave: int = 1  # cp_kv_cache_interleave_size

    @property
    def dcp_rank(self) -> int:
        return self.tp_rank % self.dcp_size


# ---- scheduler half ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Params:
    """kv_transfer_params: what the router carries from prefill to decode."""

    address: str
    room: int
    key: bytes
    n_senders: int
    end: int


@dataclass(frozen=True)
class Load:
    """Decode: a request whose blocks have been allocated."""

    params: Params
    cached: int  # tokens of its own prefix cache
    blocks: Sequence[Sequence[int]]  # by group, of [0, end); null blocks where none is needed


@dataclass(frozen=True)
class Save:
    """Prefill: what a step computes of a request."""

    request: str
    start: int
    tokens: int
    blocks: Sequence[Sequence[int]]
    last: bool


@dataclass
class Metadata:
    """From the scheduler half to the worker halves, each step."""

    opens: Dict[str, Tuple[int, bytes]] = field(default_factory=dict)  # room and key
    saves: List[Save] = field(default_factory=list)
    loads: Dict[str, Load] = field(default_factory=dict)


class Scheduler:
    """The half that decides; it calls the daemon only to renew and to decline."""

    def __init__(self, client: kvpack.Client, n_workers: int) -> None:
        self.client = client
        self.n_workers = n_workers
        self.rooms: Dict[str, Tuple[int, bytes]] = {}
        self.queued: Dict[str, Params] = {}
        self.meta = Metadata()

    # prefill

    def add_prefill(self, request: str) -> None:
        room = secrets.randbits(63), secrets.token_bytes(16)
        self.rooms[request] = self.meta.opens[request] = room

    def add_save(self, save: Save) -> None:
        self.meta.saves.append(save)

    def request_finished(self, request: str, end: int) -> Tuple[bool, Params]:
        """Blocks are freed later, when get_finished() of the workers says "sent"."""
        room, key = self.rooms.pop(request)
        return True, Params(self.client.node_address, room, key, self.n_workers, end)

    # decode

    def get_num_new_matched_tokens(
        self, params: Optional[Params], computed: int
    ) -> Tuple[int, bool]:
        """(tokens that come from outside, loaded asynchronously)"""
        return (params.end - computed, True) if params else (0, False)

    def enqueue(self, request: str, params: Params) -> None:
        self.queued[request] = params

    def renew(self) -> None:
        """Every third of the lease, for requests that wait for blocks."""
        for params in self.queued.values():
            for sender in range(params.n_senders):
                self.client.renew(
                    params.address, params.room, sender, key=params.key, lease_ms=LEASE_MS
                )

    def cancel(self, request: str) -> None:
        """Before its blocks were allocated: prefill frees at once, not at the end of the lease."""
        params = self.queued.pop(request)
        for sender in range(params.n_senders):
            self.client.decline(
                params.address, params.room, sender, key=params.key, reason="cancelled"
            )

    def update_state_after_alloc(
        self, request: str, blocks: Sequence[Sequence[int]], cached: int
    ) -> None:
        self.meta.loads[request] = Load(self.queued.pop(request), cached, blocks)

    # both

    def build_connector_meta(self) -> Metadata:
        meta, self.meta = self.meta, Metadata()
        return meta


# ---- worker half ---------------------------------------------------------------------------------


class Worker:
    """The half that moves; one for each rank."""

    def __init__(self, socket: str, parallel: Parallel, name: str) -> None:
        self.client = kvpack.Client(socket, name=name)
        self.parallel = parallel
        self.sending: Dict[str, kvpack.Room] = {}
        self.chunks: Dict[str, int] = {}  # submitted
        self.ended: Set[str] = set()  # their last chunk was submitted
        self.receiving: Dict[str, Tuple[kvpack.Room, Load]] = {}
        self.load_errors: Set[Tuple[int, int]] = set()  # (group, block)
        self.meta = Metadata()

    def register_kv_caches(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        entries: List[kvpack.Entry] = []
        self.entry_of_layer: Dict[int, int] = {}
        for number, group in enumerate(groups):
            for layer, cache in group.caches.items():
                self.entry_of_layer[layer] = len(entries)
                entries.append(kvpack.Entry.rows(cache, layer, group=number))
        self.pool = self.client.register(entries, tag=b"demo hash")
        # One timeline for each layer: each is saved when it has been computed.
        self.fence = self.client.fence(len(entries))

    def bind_connector_metadata(self, meta: Metadata) -> None:
        self.meta = meta

    def start_load_kv(self) -> None:
        """New requests: rooms at prefill, expectations at decode. Returns at once."""
        for request, (room, key) in self.meta.opens.items():
            self.sending[request] = self.client.open(
                kvpack.Open(
                    room,
                    self.pool,
                    [kvpack.Side(group.block_size, group=i) for i, group in enumerate(self.groups)],
                    sender=self.parallel.tp_rank,
                    key=key,
                    label=request,
                    timers=kvpack.Timers(lease_ms=LEASE_MS),
                )
            )
            self.chunks[request] = 0
        for request, load in self.meta.loads.items():
            self.receiving[request] = self._expect(request, load), load

    def _expect(self, request: str, load: Load) -> kvpack.Room:
        params = load.params
        return self.client.expect(
            kvpack.Expect(
                params.room,
                self.pool,
                [self._load_side(i, load) for i in range(len(self.groups))],
                senders=[kvpack.Sender(params.address, self.parallel.tp_rank % params.n_senders)],
                end=params.end,
                dest=self.parallel.tp_rank,
                key=params.key,
                label=request,
            )
        )

    def _load_side(self, number: int, load: Load) -> kvpack.Side:
        """Prefill sends from 0 on; `first` keeps cached blocks and those below a window out."""
        group, mine = self.groups[number], self.parallel
        first = load.cached
        if group.window:
            first = max(first, load.params.end - group.window)
        width = group.block_size * mine.dcp_size
        return kvpack.Side(
            page=group.block_size,
            pages=load.blocks[number][first // width :],
            pos0=first // width * width,
            dcp_size=mine.dcp_size,
            dcp_rank=mine.dcp_rank,
            interleave=mine.interleave,
            first=first,
            group=number,
        )

    def _save_sides(self, save: Save) -> List[kvpack.Side]:
        sides = []
        for number, group in enumerate(self.groups):
            at = save.start // group.block_size
            pages = save.blocks[number][at:]
            sides.append(
                kvpack.Side(group.block_size, pages, at * group.block_size, group=number)
            )
        return sides

    def save_kv_layer(self, layer: int) -> None:
        """Called when the layer's work has been enqueued, before it is done."""
        entry = self.entry_of_layer[layer]
        point = self.fence.next(entry)
        for save in self.meta.saves:
            if save.tokens:
                self._submit(save, entries=[entry], fence=point)
        self.signal_when_computed(point)

    def signal_when_computed(self, point: kvpack.FencePoint) -> None:
        """A GPU engine enqueues this on the stream: fence.signal_on_stream(point, stream)."""
        self.fence.signal(point)

    def wait_for_save(self) -> None:
        """Nothing to wait for: blocks stay owned until they are "sent". Ends finished prompts."""
        for save in self.meta.saves:
            if save.last:
                end = Save(save.request, save.start + save.tokens, 0, save.blocks, True)
                self._submit(end, last=True)
                self.ended.add(save.request)

    def save_step(self) -> None:
        """Instead of both, for engines that do not save layer by layer."""
        for save in self.meta.saves:
            self._submit(save, last=save.last)
            if save.last:
                self.ended.add(save.request)

    def _submit(
        self,
        save: Save,
        *,
        entries: Optional[Iterable[int]] = None,
        fence: Optional[kvpack.FencePoint] = None,
        last: bool = False,
    ) -> None:
        chunk = kvpack.Chunk(
            save.start, save.tokens, self._save_sides(save), entries, fence, last=last
        )
        self.chunks[save.request] = self.sending[save.request].submit(chunk) + 1

    def handle_preemptions(self, request: str, first_chunk: int) -> int:
        """Before its blocks are overwritten. Recomputed tokens are submitted again from the
        returned chunk number on; the room lives."""
        room = self.sending[request]
        first = room.recall(first_chunk)
        if first > first_chunk:  # those are being packed
            room.wait_source_free(first)
        self.chunks[request] = first
        return first

    def get_finished(self) -> Tuple[Set[str], Set[str]]:
        """(sent: blocks may be freed, received: tokens are there, or errors are known)"""
        self.client.process()
        sent = {name for name in self.ended if self._is_sent(name)}
        for name in sent:
            self.ended.discard(name)
        received = {
            name for name, (room, load) in self.receiving.items() if self._is_in(room, load)
        }
        for name in received:
            room, _ = self.receiving.pop(name)
            room.forget()
        return sent, received

    def _is_sent(self, request: str) -> bool:
        state = self.sending[request].state
        return state.source_free >= self.chunks[request] or state.released

    def _is_in(self, room: kvpack.Room, load: Load) -> bool:
        state = room.state
        if state.complete:
            return True
        if not (state.failed and state.released):
            return False
        # Rows below `arrived` are there in every entry; the blocks behind them are errors.
        for number, group in enumerate(self.groups):
            width = group.block_size * self.parallel.dcp_size
            for block in load.blocks[number][state.arrived // width :]:
                self.load_errors.add((number, block))
        return True

    def get_block_ids_with_load_errors(self) -> Set[Tuple[int, int]]:
        errors, self.load_errors = self.load_errors, set()
        return errors

    def shutdown(self) -> None:
        self.client.close()
