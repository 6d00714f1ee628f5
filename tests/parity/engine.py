# SPDX-License-Identifier: Apache-2.0
"""A prefill engine with pipeline stages and a decode engine with DCP ranks, each a process.

Prefill computes in chunks and sends each one while it computes the next; decode announces pages,
waits until they are complete, and answers with what they hold. Nothing but kvpack moves rows.
"""

from __future__ import annotations

import pickle
import socket
from dataclasses import dataclass, field
from typing import Any, List, Optional, Sequence

import numpy as np

import kvpack
import model
from arrays import PLACES
from model import Partial
from monolithic import Answer
from paged import Caches, Table

Array = Any

SECS = 30


@dataclass(frozen=True)
class Shape:
    """How the two engines are built."""

    fmt: Any
    dcp_size: int = 1
    interleave: int = 1
    stages: int = 1
    page: int = 8
    chunk: int = 40  # tokens of a prefill step
    prefill_pages: int = 64
    needle: bool = False
    place: str = "numpy"  # of the caches: a key of arrays.PLACES

    @property
    def width(self) -> int:
        return self.page * self.dcp_size

    @property
    def decode_pages(self) -> int:
        return 512 // self.width + 3

    def weights(self) -> model.Weights:
        return model.needle_weights() if self.needle else model.random_weights()

    def layers(self, stage: int) -> Sequence[int]:
        return range(
            model.LAYERS * stage // self.stages, model.LAYERS * (stage + 1) // self.stages
        )

    def __str__(self) -> str:
        return (
            f"dcp {self.dcp_size}, interleave {self.interleave}, {self.fmt.name}, "
            f"stages {self.stages}"
            + (", needle" if self.needle else "")
            + (f", {self.place}" if self.place != "numpy" else "")
        )


@dataclass(frozen=True)
class Request:
    """room: the request's own number; prefix: tokens that an earlier room leaves at decode."""

    room: int
    prompt: List[int]
    prefix: int = 0
    steps: int = 6
    forced: Optional[int] = None

    def cached(self, page: int) -> int:
        """Tokens that prefill has computed before: it sends those that decode lacks at once."""
        return min(self.prefix + 2 * page, len(self.prompt) - 1) // page * page

    def pages(self, n: int, pool: int, salt: int) -> List[int]:
        rng = np.random.default_rng([self.room, salt])
        return (1 + rng.permutation(pool - 1)[:n]).tolist()


@dataclass(frozen=True)
class Fault:
    """What decode's rank 0 does to what has arrived, to prove that it shows.

    swap: two rows of layer 0 change places. shift: one lands a slot too far, on another one.
    draft: the same in the draft layer. state: a number of a recurrent state is another one's.
    """

    kind: str = ""


# ---- prefill -------------------------------------------------------------------------------------


class PrefillStage:
    """Some layers of the prefill engine. Hidden states come from the stage before it."""

    def __init__(self, shape: Shape, stage: int, socket_path: str, before: Any, behind: Any):
        self.shape, self.stage = shape, stage
        self.before, self.behind = before, behind  # pipes, or None
        self.weights, self.place = shape.weights(), PLACES[shape.place]
        self.layers = shape.layers(stage)
        self.is_last = stage == shape.stages - 1
        self.client = kvpack.Client(socket_path, name=f"prefill {stage}")
        self.fence = self.client.fence()
        self.caches = Caches(
            self.client,
            self.place,
            shape.fmt,
            self.layers,
            shape.prefill_pages,
            shape.page,
            shape.page,
            self.is_last,
        )

    def serve(self, request: Request) -> None:
        pages = request.pages(self.shape.prefill_pages - 1, self.shape.prefill_pages, self.stage)
        table = Table(pages, self.shape.page, 1, 0, 1)
        for layer in self.caches.states:
            self.caches.set_state(layer, 0, model.State.zero())
        done = 0
        if request.prefix:  # an earlier request: decode wants the prefix, prefill computes more
            done = request.cached(self.shape.page)
            self._compute(request, table, 0, done)
            room = self._open(2 * request.room)
            self._submit(room, table, 0, request.prefix, None, True, b"")
            room.wait(SECS)
            room.forget()
        with self._open(2 * request.room + 1) as room:
            assert room.state.prefix == request.prefix
            self._send(room, request, table, done)
            room.wait_source_free(self.chunks, SECS)
            for array in [*self.caches.rows.values(), *self.caches.draft.values()]:
                array[:] = 0xA5  # the pages are reused at once
            room.wait(SECS)

    def _open(self, number: int) -> kvpack.Room:
        self.chunks = 0
        room = self.client.open(
            kvpack.Open(
                number, self.caches.pool, [kvpack.Side(self.shape.page)], sender=self.stage
            )
        )
        room.wait_ready(SECS)
        return room

    def _send(self, room: kvpack.Room, request: Request, table: Table, done: int) -> None:
        at, end = request.prefix, len(request.prompt)
        if done > at:  # cached here, not there: needs no fence
            self._submit(room, table, at, done, None, False, b"")
            at = done
        while at < end:
            to = min(at + self.shape.chunk, end)
            if to < end:  # submitted first, computed then: the daemon must not read early
                point = self.fence.next()
                self._submit(room, table, at, to, point, False, b"")
                self._compute(request, table, at, to)
                self.place.signal(point)
            else:  # the last one carries what only its computation tells
                said = self._compute(request, table, at, to)
                self._submit(room, table, at, to, None, True, self._aux(request, said))
            at = to

    def _aux(self, request: Request, said: Array) -> bytes:
        if not self.is_last:
            return b""
        token = int(said.argmax()) if request.forced is None else request.forced
        return token.to_bytes(4, "little")

    def _submit(
        self,
        room: kvpack.Room,
        table: Table,
        start: int,
        end: int,
        point: Optional[kvpack.FencePoint],
        last: bool,
        meta: bytes,
    ) -> None:
        page = self.shape.page
        pages = table.pages[start // page : -(-end // page)]
        side = kvpack.Side(page, pages, pos0=start // page * page)
        segments = self.caches.segments(0) if last else []
        if point is None:
            self.place.settle()
        chunk = kvpack.Chunk(
            start, end - start, [side], fence=point, last=last, segments=segments, meta=meta
        )
        self.chunks = room.submit(chunk) + 1

    def _compute(self, request: Request, table: Table, start: int, end: int) -> Array:
        tokens, at = np.array(request.prompt[start:end]), np.arange(start, end)
        hidden = self.before.recv() if self.before else self.weights.embed[tokens]
        for layer in self.layers:
            if layer in self.caches.rows:
                hidden = self._mla(layer, self.caches.rows[layer], table, hidden, at)
            else:
                state = self.caches.state(layer, 0)
                hidden, state = model.recur(self.weights.recurrent[layer], hidden, state)
                self.caches.set_state(layer, 0, state)
        if self.behind:
            self.behind.send(hidden)
        if not self.is_last:
            return None
        draft = model.draft_input(self.weights, hidden, tokens)
        self._mla(model.DRAFT, self.caches.draft[model.DRAFT], table, draft, at)
        return model.logits(self.weights, hidden[-1])

    def _mla(self, layer_id: int, rows: Array, table: Table, hidden: Array, at: Array) -> Array:
        layer, fmt = self.weights.mla[layer_id], self.shape.fmt
        rows[table.place(at)] = fmt.encode(model.new_rows(layer, hidden, at))
        positions = np.arange(at[-1] + 1)
        kept = fmt.decode(rows[table.place(positions)])
        query = model.queries(layer, hidden, at)
        return model.add_attended(layer, hidden, model.attend(layer, query, at, kept, positions))


def run_prefill(
    shape: Shape, stage: int, path: str, before: Any, behind: Any, requests: List[Request]
) -> None:
    prefill = PrefillStage(shape, stage, path, before, behind)
    for request in requests:
        prefill.serve(request)
    prefill.client.close()


# ---- decode --------------------------------------------------------------------------------------


class Group:
    """The collective of the decode ranks: rank 0 has a socket to each, the others one to it."""

    def __init__(self, peers: List[socket.socket], is_root: bool) -> None:
        self.peers, self.is_root = peers, is_root

    def all_gather(self, mine: Any) -> List[Any]:
        if not self.is_root:
            self.peers[0].send(pickle.dumps(mine, 5))
            return list(pickle.loads(self.peers[0].recv(1 << 20)))
        everything = [mine] + [pickle.loads(peer.recv(1 << 20)) for peer in self.peers]
        data = pickle.dumps(everything, 5)
        for peer in self.peers:
            peer.send(data)
        return everything


@dataclass
class Sources:
    """Prefill, as decode knows it."""

    address: str
    stages: int
    dests: int

    def senders(self) -> List[kvpack.Sender]:
        return [kvpack.Sender(self.address, stage, self.dests) for stage in range(self.stages)]


@dataclass
class DecodeRank:
    shape: Shape
    rank: int
    path: str
    sources: Sources
    group: Group
    fault: Fault = field(default_factory=Fault)

    def __post_init__(self) -> None:
        self.weights, self.place = self.shape.weights(), PLACES[self.shape.place]
        self.client = kvpack.Client(self.path, name=f"decode {self.rank}")
        self.caches = Caches(
            self.client,
            self.place,
            self.shape.fmt,
            range(model.LAYERS),
            self.shape.decode_pages,
            self.shape.page,
            self.shape.width,
            True,
        )

    def serve(self, request: Request) -> Answer:
        shape, end = self.shape, len(request.prompt)
        n = -(-(end + request.steps) // shape.width)
        pages = request.pages(n, shape.decode_pages, 99)  # the same list at every rank
        self.table = Table(pages, shape.page, shape.dcp_size, self.rank, shape.interleave)
        if request.prefix:
            self._load(2 * request.room, 0, request.prefix, slot=1, meta_from=-1)
        last = shape.stages - 1
        aux = self._load(2 * request.room + 1, request.prefix, end, slot=0, meta_from=last)
        self._spoil(end)
        return self._answer(int.from_bytes(aux, "little"), end, request.steps)

    def _load(self, number: int, prefix: int, end: int, slot: int, meta_from: int) -> bytes:
        shape = self.shape
        side = kvpack.Side(
            page=shape.page,
            pages=self.table.pages[prefix // shape.width : -(-end // shape.width)],
            pos0=prefix,
            dcp_size=shape.dcp_size,
            dcp_rank=self.rank,
            interleave=shape.interleave,
        )
        expect = kvpack.Expect(
            number,
            self.caches.pool,
            [side],
            senders=self.sources.senders(),
            prefix=prefix,
            end=end,
            dest=self.rank,
            segments=self.caches.segments(slot),
            meta_from=meta_from,
        )
        with self.client.expect(expect) as room:
            room.wait(SECS)
            return room.wait_released(SECS).meta

    def _spoil(self, end: int) -> None:
        kind = self.fault.kind
        if not kind or self.rank:
            return
        if kind == "state":
            states = self.caches.states[model.STATE_LAYERS[0]]
            states[0, 0, 0] = states[0, 1, 1]
        elif kind == "draft":
            every = np.arange(end)
            self._move(self.caches.draft[model.DRAFT], self.table.place_all(every), False)
        else:
            places = self.table.place(self.table.owned(0, end))
            self._move(self.caches.rows[model.MLA_LAYERS[0]], places, kind == "swap")

    def _move(self, rows: Array, places: "tuple[Array, Array]", is_swap: bool) -> None:
        """Of the rows at these places, one of the middle to the place of the next."""
        page, slot = places
        i = len(page) // 2 - 1
        moved, lost = rows[page[i : i + 2], slot[i : i + 2]]
        rows[page[i + 1], slot[i + 1]] = moved
        if is_swap:
            rows[page[i], slot[i]] = lost

    def _answer(self, token: int, end: int, steps: int) -> Answer:
        tokens, log_probs, draft = [token], [], []
        for position in range(end, end + steps):
            probs, draft_probs = self._step(token, position)
            token = int(probs.argmax())
            tokens.append(token)
            log_probs.append(probs)
            draft.append(draft_probs)
        return Answer(tokens, np.stack(log_probs), np.stack(draft))

    def _step(self, token: int, position: int) -> "tuple[Array, Array]":
        tokens = np.array([token])
        hidden = self.weights.embed[tokens]
        for layer in range(model.LAYERS):
            if layer in self.caches.rows:
                hidden = self._mla(layer, hidden, position)
            else:
                state = self.caches.state(layer, 0)
                hidden, state = model.recur(self.weights.recurrent[layer], hidden, state)
                self.caches.set_state(layer, 0, state)
        draft = self._draft(model.draft_input(self.weights, hidden, tokens), position)
        return model.logits(self.weights, hidden[0]), model.draft_logits(self.weights, draft[0])

    def _mla(self, layer_id: int, hidden: Array, position: int) -> Array:
        """Its owner keeps the token's row; each rank attends over its shard; then they merge."""
        layer, rows = self.weights.mla[layer_id], self.caches.rows[layer_id]
        at = np.array([position])
        mine = self.table.owned(position, position + 1)
        if len(mine):
            fresh = model.new_rows(layer, hidden, at)
            rows[self.table.place(mine)] = self.shape.fmt.encode(fresh)
        owned = self.table.owned(0, position + 1)
        kept = self.shape.fmt.decode(rows[self.table.place(owned)])
        query = model.queries(layer, hidden, at)
        partial = model.attend_partly(layer, query, at, kept, owned)
        parts = self.group.all_gather(tuple(partial))
        return model.add_attended(layer, hidden, model.merge([Partial(*part) for part in parts]))

    def _draft(self, hidden: Array, position: int) -> Array:
        """Each rank has all rows of the draft layer."""
        layer, rows = self.weights.mla[model.DRAFT], self.caches.draft[model.DRAFT]
        at = np.array([position])
        rows[self.table.place_all(at)] = self.shape.fmt.encode(model.new_rows(layer, hidden, at))
        positions = np.arange(position + 1)
        kept = self.shape.fmt.decode(rows[self.table.place_all(positions)])
        query = model.queries(layer, hidden, at)
        return model.add_attended(layer, hidden, model.attend(layer, query, at, kept, positions))


def run_decode(
    shape: Shape,
    rank: int,
    path: str,
    sources: Sources,
    group: Group,
    fault: Fault,
    requests: List[Request],
) -> List[Answer]:
    decode = DecodeRank(shape, rank, path, sources, group, fault)
    answers = [decode.serve(request) for request in requests]
    decode.client.close()
    return answers
