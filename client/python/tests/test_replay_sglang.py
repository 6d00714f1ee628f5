# SPDX-License-Identifier: Apache-2.0
"""SGLang's call orders, played with examples/sglang_connector.py: every rank is a process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Callable, List

import kvpack
import numpy as np
import pytest
import rows
from rig import Daemon, Rig, Stages, run_ranks
from sglang_connector import KVArgs, KVManager, KVPoll, KVReceiver, KVSender, Source

PAGE, ROW, LAYERS, DRAFT, STATE = 16, 96, 4, 27, 100
POOL = 80  # pages
STATE_BYTES = 3000
AUX_BYTES = 15900
SECS = 20
DAEMON = "[host]\nslots = 8\nslot_bytes = 64k\n"


@dataclass(frozen=True)
class Layout:
    """Two engines and the request that they serve."""

    prefill_tp: int = 1
    decode_tp: int = 1
    dcp: int = 1
    stages: int = 1
    prefill_nodes: int = 1
    decode_nodes: int = 1
    early: bool = False
    prefix: int = 0
    end: int = 501
    chunk: int = 128
    room: int = 41

    @property
    def width(self) -> int:
        return PAGE * self.dcp

    def layers(self, stage: int) -> range:
        return range(LAYERS * stage // self.stages, LAYERS * (stage + 1) // self.stages)


def poll_until(end: Any, wanted: KVPoll) -> KVPoll:
    """The scheduler's loop: polls until it is there or has failed; it never goes back."""
    until, last = time.monotonic() + SECS, KVPoll.Bootstrapping
    while True:
        now = end.poll()
        assert now == KVPoll.Failed or now >= last, f"went back from {last} to {now}"
        if now == KVPoll.Failed or now >= wanted:
            return now
        last = now
        assert time.monotonic() < until, f"poll state is {now}, not {wanted}"
        end.mgr.client.process()
        time.sleep(0.001)


def reach(end: Any, wanted: KVPoll) -> None:
    if poll_until(end, wanted) == KVPoll.Failed:
        end.failure_exception()


# ---- prefill -------------------------------------------------------------------------------------


@dataclass
class Prefill:
    """A rank of the prefill engine: tensor-parallel rank tp of a pipeline stage."""

    lay: Layout
    node: Daemon
    tp: int
    stage: int
    generation: int = 1

    def __post_init__(self) -> None:
        self.sender = self.tp * self.lay.stages + self.stage
        self.last_stage = self.stage == self.lay.stages - 1
        layers = self.lay.layers(self.stage)
        memory = kvpack.Memory(1 << 21)
        self.kv = {layer: memory.take((POOL, PAGE, ROW)) for layer in layers}
        self.draft = {DRAFT: memory.take((POOL, PAGE, ROW // 2))} if self.last_stage else {}
        self.state = {STATE: memory.take((4, STATE_BYTES))} if self.last_stage else {}
        args = KVArgs(PAGE, self.kv, self.draft, self.state)
        self.mgr = KVManager(self.node.socket, args, f"prefill {self.sender}")
        self.fence = self.mgr.client.fence()
        self.pages = rows.some_pages(POOL - 1, POOL, self.lay.room + self.sender)

    @property
    def key(self) -> int:
        return self.lay.room * 10000 + self.generation * 1000 + self.sender

    def compute(self, start: int, end: int) -> None:
        side = kvpack.Side(PAGE, self.pages)
        for layer, array in [*self.kv.items(), *self.draft.items()]:
            rows.put_rows(array, self.key, layer, side, start, end)
        for layer, array in self.state.items():
            array[1] = rows.row_bytes(self.key, layer, 0, STATE_BYTES)

    def send(self, sender: KVSender, tokens: int, fence: Any, last: bool) -> None:
        start = sender.position
        pages = self.pages[start // PAGE : -(-(start + tokens) // PAGE)]
        aux = rows.row_bytes(self.key, 0, 1, AUX_BYTES).tobytes()
        carries = last and self.last_stage
        sender.send(
            pages,
            tokens,
            fence,
            last=last,
            state_slot=1 if carries else None,
            aux=aux if carries else b"",
        )

    def send_all(self, sender: KVSender) -> None:
        """Submits each chunk first and computes it then, as a stream does."""
        lay = self.lay
        if lay.early and sender.position + 4 * PAGE < lay.end:  # prefill's own cached prefix
            self.compute(sender.position, sender.position + 4 * PAGE)
            self.send(sender, 4 * PAGE, None, False)
        while True:
            start = sender.position
            tokens = min(lay.chunk, lay.end - start)
            point = self.fence.next()
            self.send(sender, tokens, point, start + tokens == lay.end)
            self.compute(start, start + tokens)
            self.fence.signal(point)
            if sender.position == lay.end:
                return

    def serve(self) -> None:
        sender = KVSender(self.mgr, self.lay.room, self.sender)
        reach(sender, KVPoll.WaitingForInput)
        assert sender.pop_decode_prefix_len() == self.lay.prefix
        self.send_all(sender)
        until = time.monotonic() + SECS
        while not sender.sources_free():
            sender.failure_exception()
            assert time.monotonic() < until
            time.sleep(0.001)
        for array in [*self.kv.values(), *self.draft.values(), *self.state.values()]:
            array[:] = 0xEE  # reused at once: must not arrive anywhere
        reach(sender, KVPoll.Success)
        sender.clear()


# ---- decode --------------------------------------------------------------------------------------


@dataclass
class Decode:
    """A rank of the decode engine."""

    lay: Layout
    node: Daemon
    rank: int
    sources: List[Source]
    generation: int = 1

    def __post_init__(self) -> None:
        lay = self.lay
        memory = kvpack.Memory(1 << 23)
        self.kv = {layer: memory.take((POOL, PAGE, ROW)) for layer in range(LAYERS)}
        self.draft = {DRAFT: memory.take((POOL, lay.width, ROW // 2))}
        self.state = {STATE: memory.take((8, STATE_BYTES))}
        args = KVArgs(PAGE, self.kv, self.draft, self.state)
        self.mgr = KVManager(self.node.socket, args, f"decode {self.rank}")
        count = -(-lay.end // lay.width)
        self.pages = rows.some_pages(count, POOL, lay.room * 7)  # one list for all ranks

    def expect(self) -> KVReceiver:
        lay = self.lay
        receiver = KVReceiver(self.mgr, lay.room, self.rank, self.sources, lay.dcp)
        assert receiver.poll() == KVPoll.Bootstrapping
        pages = self.pages[lay.prefix // lay.width :]
        receiver.send_metadata(pages, lay.prefix, lay.end, state_slot=5)
        return receiver

    def arrays(self) -> Any:
        return [*self.kv.values(), *self.draft.values(), *self.state.values()]

    def check(self, aux: bytes) -> None:
        """Each byte of the pool is what it should be, and nothing else was touched."""
        lay = self.lay
        dcp_rank = self.rank % lay.dcp
        side = kvpack.Side(PAGE, self.pages, 0, lay.dcp, dcp_rank)
        for source in self.sources:
            if source.dummy:
                continue
            key = lay.room * 10000 + self.generation * 1000 + source.sender
            for layer in lay.layers(source.sender % lay.stages):
                expected = np.zeros_like(self.kv[layer])
                rows.put_rows(expected, key, layer, side, lay.prefix, lay.end)
                assert (self.kv[layer] == expected).all(), f"layer {layer}"
            if source.has_state:
                expected = np.zeros_like(self.draft[DRAFT])
                every = rows.replicated(side)
                rows.put_rows(expected, key, DRAFT, every, lay.prefix, lay.end)
                assert (self.draft[DRAFT] == expected).all()
                assert (self.state[STATE][5] == rows.row_bytes(key, STATE, 0, STATE_BYTES)).all()
                assert aux == rows.row_bytes(key, 0, 1, AUX_BYTES).tobytes()
        assert not np.delete(self.state[STATE], 5, axis=0).any()

    def serve(self) -> None:
        receiver = self.expect()
        reach(receiver, KVPoll.Success)
        self.check(receiver.aux())
        receiver.clear()


def sources_of(lay: Layout, nodes: List[Daemon], rank: int) -> List[Source]:
    """The rank mapping: docs/engines.md, section 2.5."""
    fan_out = max(lay.decode_tp // lay.prefill_tp, 1)
    fan_in = max(lay.prefill_tp // lay.decode_tp, 1)
    sources = []
    for tp in range(rank // fan_out * fan_in, rank // fan_out * fan_in + fan_in):
        for stage in range(lay.stages):
            sources.append(
                Source(
                    nodes[stage % lay.prefill_nodes].address,
                    tp * lay.stages + stage,
                    fan_out,
                    dummy=tp % fan_in != 0,
                    has_state=stage == lay.stages - 1,
                )
            )
    return sources


def play(rig: Rig, lay: Layout) -> None:
    prefill = [rig.daemon(f"p{i}", DAEMON) for i in range(lay.prefill_nodes)]
    decode = [rig.daemon(f"d{i}", DAEMON) for i in range(lay.decode_nodes)]
    ranks: Any = []
    for rank in range(lay.decode_tp):
        node = decode[rank * lay.decode_nodes // lay.decode_tp]
        sources = sources_of(lay, prefill, rank)
        ranks.append((f"decode {rank}", lambda *a: Decode(*a).serve(), (lay, node, rank, sources)))
    for tp in range(lay.prefill_tp):
        for stage in range(lay.stages):
            args = (lay, prefill[stage % lay.prefill_nodes], tp, stage)
            ranks.append((f"prefill {tp}.{stage}", lambda *a: Prefill(*a).serve(), args))
    run_ranks(ranks, 60)


LAYOUTS = {
    "tp4_to_tp4_dcp4": Layout(4, 4, 4),
    "tp8_to_tp4_dummies": Layout(8, 4, 4),
    "tp2_to_tp4_shared_dcp_ranks": Layout(2, 4, 2),
    "two_stages_on_two_nodes": Layout(2, 2, 2, stages=2, prefill_nodes=2),
    "decode_on_two_nodes": Layout(1, 4, 4, decode_nodes=2),
    "cached_prefix": Layout(2, 2, 2, early=True, prefix=96),
    "full_prefix_hit": Layout(2, 2, 2, prefix=320, end=320),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(rig, name):
    play(rig, LAYOUTS[name])


# ---- a request that is retracted and comes again with the same room ------------------------------


@dataclass
class Retract:
    node: Daemon
    address: str
    stages: Stages
    lay: Layout = field(default_factory=lambda: Layout(dcp=4, decode_tp=1))

    def prefill(self) -> None:
        rank = Prefill(self.lay, self.node, 0, 0)
        sender = KVSender(rank.mgr, self.lay.room, 0)
        reach(sender, KVPoll.WaitingForInput)
        sender.pop_decode_prefix_len()
        rank.compute(0, 128)
        rank.send(sender, 128, None, False)
        rank.send(sender, 128, rank.fence.next(), False)  # is never computed
        assert poll_until(sender, KVPoll.Success) == KVPoll.Failed
        with pytest.raises(kvpack.AbortedError, match="cancelled"):
            sender.failure_exception()
        while not sender.is_released():
            time.sleep(0.001)
        assert sender.sources_free()
        sender.clear()
        self.stages.wait(0)  # decode's second offer is there already: it is parked
        rank.generation = 2
        rank.serve()

    def decode(self) -> None:
        source = Source(self.address, 0, 1, has_state=True)
        rank = Decode(self.lay, self.node, 0, [source])
        receiver = rank.expect()
        while receiver._room().state.arrived < 128:
            assert receiver.poll() != KVPoll.Failed
            time.sleep(0.001)
        receiver.abort()
        assert poll_until(receiver, KVPoll.Success) == KVPoll.Failed
        while not receiver.is_released():
            time.sleep(0.001)
        assert receiver._room().state.arrived == 128
        receiver.clear()
        for array in rank.arrays():
            array[:] = 0  # the pages are the engine's again
        rank.generation = 2
        receiver = rank.expect()
        self.stages.set(0)
        reach(receiver, KVPoll.Success)
        rank.check(receiver.aux())
        receiver.clear()


def test_retract_with_the_same_room(rig):
    p, d, stages = rig.daemon("p0", DAEMON), rig.daemon("d0", DAEMON), Stages()
    run_ranks(
        [
            ("decode", Retract(d, p.address, stages).decode, ()),
            ("prefill", Retract(p, p.address, stages).prefill, ()),
        ]
    )


# ---- aborts --------------------------------------------------------------------------------------


@dataclass
class Aborts:
    """By whom, and when: alone, when ready, or with a chunk on its way."""

    node: Daemon
    address: str
    stages: Stages
    cases = [(who, when) for when in ("alone", "ready", "moving") for who in ("prefill", "decode")]

    def each(self, fn: Callable[[Layout, str, str], None], mine: int, other: int) -> None:
        for i, (who, when) in enumerate(self.cases):
            fn(Layout(room=500 + i, dcp=2), who, when)
            self.stages.set(mine, i + 1)
            self.stages.wait(other, i + 1)

    def over(self, end: Any) -> None:
        assert poll_until(end, KVPoll.Success) == KVPoll.Failed
        until = time.monotonic() + SECS
        while not end.is_released():
            assert time.monotonic() < until
            time.sleep(0.001)
        end.clear()

    def prefill_one(self, lay: Layout, who: str, when: str) -> None:
        rank = Prefill(lay, self.node, 0, 0)
        if when == "alone" and who == "decode":
            return
        sender = KVSender(rank.mgr, lay.room, 0)
        if when != "alone" and poll_until(sender, KVPoll.WaitingForInput) != KVPoll.Failed:
            if when == "moving":
                rank.compute(0, 128)
                rank.send(sender, 128, None, False)
                poll_until(sender, KVPoll.Transferring)
        if who == "prefill":
            sender.abort()
        self.over(sender)
        rank.mgr.close()

    def decode_one(self, lay: Layout, who: str, when: str) -> None:
        rank = Decode(lay, self.node, 0, [Source(self.address, 0, 1, has_state=True)])
        if when == "alone" and who == "prefill":
            return
        receiver = rank.expect()
        if who == "decode" and when == "ready":
            receiver._room().wait_ready(SECS)
        if who == "decode" and when == "moving":
            poll_until(receiver, KVPoll.Transferring)
        if who == "decode":
            receiver.abort()
        self.over(receiver)
        rank.mgr.close()

    def prefill(self) -> None:
        self.each(self.prefill_one, 0, 1)

    def decode(self) -> None:
        self.each(self.decode_one, 1, 0)


def test_abort_at_any_time(rig):
    p, d, stages = rig.daemon("p0", DAEMON), rig.daemon("d0", DAEMON), Stages()
    run_ranks(
        [
            ("decode", Aborts(d, p.address, stages).decode, ()),
            ("prefill", Aborts(p, p.address, stages).prefill, ()),
        ]
    )
