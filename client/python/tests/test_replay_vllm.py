# SPDX-License-Identifier: Apache-2.0
"""vLLM's call orders, played with examples/vllm_connector.py: every worker is a process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, List, Optional, Sequence, Set

import kvpack
import numpy as np
import pytest
import rows
import vllm_connector
from rig import Daemon, Rig, Stages, processes, run_ranks
from vllm_connector import Group, Parallel, Params, Save, Scheduler, Worker

BLOCK, WINDOW_BLOCK, BLOCKS, BYTES = 16, 32, 96, 72
STEP = 128  # tokens that prefill computes in a step
SECS = 20
REQUEST = "request"
DAEMON = "[host]\nslots = 8\nslot_bytes = 64k\n"

PUBLISHED, EXPECTED, GONE = range(3)  # stages


@dataclass(frozen=True)
class Case:
    """Two engines and one request."""

    tp: int = 1
    dcp: int = 1
    interleave: int = 1
    end: int = 501
    cached: int = 0  # at decode
    window: int = 0  # of layers 2 and 3, in a group of their own
    layerwise: bool = False

    def groups(self) -> List[Group]:
        memory = kvpack.Memory(1 << 20)
        full = {layer: memory.take((BLOCKS, BLOCK, BYTES)) for layer in (0, 1)}
        if not self.window:
            return [Group(BLOCK, full)]
        window = {layer: memory.take((BLOCKS, WINDOW_BLOCK, BYTES)) for layer in (2, 3)}
        return [Group(BLOCK, full), Group(WINDOW_BLOCK, window, self.window)]

    def blocks(self, seed: int, dcp: int) -> List[Sequence[int]]:
        """A block table for each group: blocks of [0, end)."""
        tables = []
        for number, size in enumerate([BLOCK, WINDOW_BLOCK] if self.window else [BLOCK]):
            count = -(-self.end // (size * dcp))
            tables.append(rows.some_pages(count, BLOCKS, seed + number))
        return tables


@dataclass
class Side:
    """What both kinds of process of a scenario have."""

    case: Case
    node: Daemon
    stages: Stages
    pipe: Any  # the router: carries Params from prefill's scheduler to decode
    rank: int = 0

    def worker(self, name: str, parallel: Parallel) -> Worker:
        worker = Worker(self.node.socket, parallel, f"{name} {self.rank}")
        worker.register_kv_caches(self.case.groups())
        return worker

    def until(self, fn: Any) -> Any:
        until = time.monotonic() + SECS
        while True:
            value = fn()
            if value:
                return value
            assert time.monotonic() < until, "not in time"
            time.sleep(0.001)


# ---- prefill -------------------------------------------------------------------------------------


@dataclass
class Prefill(Side):
    """Scheduler and worker of a prefill rank in one process."""

    def start(self) -> None:
        self.w = self.worker("prefill", Parallel(self.rank))
        self.s = Scheduler(self.w.client, self.case.tp)
        self.blocks = self.case.blocks(50 + self.rank, 1)
        self.generation = 1

    def arrays(self) -> List[Any]:
        return [cache for group in self.w.groups for cache in group.caches.values()]

    def compute(self, start: int, end: int, layers: Optional[Set[int]] = None) -> None:
        for number, group in enumerate(self.w.groups):
            side = kvpack.Side(group.block_size, self.blocks[number])
            for layer, cache in group.caches.items():
                if layers is None or layer in layers:
                    key = 10 * self.generation + self.rank
                    rows.put_rows(cache, key, layer, side, start, end)

    def step(self, start: int, end: int) -> None:
        """One step of the engine, forward included."""
        last = end == self.case.end
        self.s.add_save(Save(REQUEST, start, end - start, self.blocks, last))
        self.w.bind_connector_metadata(self.s.build_connector_meta())
        self.w.start_load_kv()
        if self.case.layerwise:
            # Each layer is saved when its work is enqueued, and computed a little later.
            self.w.signal_when_computed = lambda point: None  # type: ignore[method-assign]
            for layer, entry in self.w.entry_of_layer.items():
                self.w.save_kv_layer(layer)
                self.compute(start, end, {layer})
                value = self.w.fence._values[entry]
                self.w.fence.signal(kvpack.FencePoint(self.w.fence, entry, value))
            self.w.wait_for_save()
        else:
            self.compute(start, end)
            self.w.save_step()

    def steps(self, start: int = 0, end: Optional[int] = None) -> None:
        end = end or self.case.end
        for at in range(start, end, STEP):
            self.step(at, min(at + STEP, end))

    def publish(self) -> Params:
        delayed, params = self.s.request_finished(REQUEST, self.case.end)
        assert delayed
        if self.rank == 0:
            for _ in range(self.case.tp):
                self.pipe.send(params)
        return params

    def run(self) -> None:
        self.start()
        if self.rank == 0:
            self.s.add_prefill(REQUEST)
            for _ in range(self.case.tp - 1):
                self.pipe.send(self.s.rooms[REQUEST])
        else:  # the scheduler is one; here each process has its own, with the same room
            room = self.pipe.recv()
            self.s.rooms[REQUEST] = self.s.meta.opens[REQUEST] = room
        self.steps()
        if self.rank == 0:  # nobody can have come yet
            assert self.w.sending[REQUEST].state.source_free == 0
        self.publish()
        self.finish()

    def finish(self) -> None:
        self.until(lambda: self.w.get_finished()[0] == {REQUEST})
        for array in self.arrays():
            array[:] = 0xEE  # blocks are free, and used for something else at once
        self.w.sending[REQUEST].wait(SECS)
        self.w.shutdown()


# ---- decode --------------------------------------------------------------------------------------


@dataclass
class Decode(Side):
    """Scheduler and worker of a decode rank in one process."""

    def start(self) -> None:
        case = self.case
        self.w = self.worker("decode", Parallel(self.rank, case.dcp, case.interleave))
        self.s = Scheduler(self.w.client, case.tp)
        self.blocks = case.blocks(7, case.dcp)  # one table for all ranks
        self.params: Params = self.pipe.recv()
        found, is_async = self.s.get_num_new_matched_tokens(self.params, case.cached)
        assert (found, is_async) == (case.end - case.cached, True)
        self.s.enqueue(REQUEST, self.params)

    def load(self) -> None:
        self.s.update_state_after_alloc(REQUEST, self.blocks, self.case.cached)
        self.w.bind_connector_metadata(self.s.build_connector_meta())
        self.w.start_load_kv()

    def received(self) -> None:
        self.until(lambda: self.w.get_finished()[1] == {REQUEST})

    def check(self, arrived: Optional[int] = None, generation: int = 1) -> None:
        """Each row below `arrived` that was asked for is there, and nothing else was written."""
        case, end = self.case, self.case.end if arrived is None else arrived
        for number, group in enumerate(self.w.groups):
            first = max(case.cached, case.end - group.window if group.window else 0)
            width = group.block_size * case.dcp
            side = kvpack.Side(
                group.block_size,
                self.blocks[number],
                dcp_size=case.dcp,
                dcp_rank=self.rank % case.dcp,
                interleave=case.interleave,
            )
            assert side.pos0 % width == 0
            for layer, cache in group.caches.items():
                expected = np.zeros_like(cache)
                key = 10 * generation + self.rank
                rows.put_rows(expected, key, layer, side, min(first, end), end)
                assert (cache == expected).all(), f"layer {layer}"

    def run(self) -> None:
        self.start()
        time.sleep(0.05)  # in the queue
        self.load()
        self.received()
        assert not self.w.get_block_ids_with_load_errors()
        self.check()
        self.w.shutdown()


def play(rig: Rig, case: Case, prefill: Any = Prefill, decode: Any = Decode) -> None:
    p, d, stages = rig.daemon("p0", DAEMON), rig.daemon("d0", DAEMON), Stages()
    ranks: List[Any] = []
    to_decode = [processes.Pipe(duplex=False) for _ in range(case.tp)]
    to_prefill = [processes.Pipe(duplex=False) for _ in range(case.tp)]
    for rank in range(case.tp):
        ranks.append(
            (f"prefill {rank}", prefill(case, p, stages, None, rank).run, ())
        )
        ranks.append((f"decode {rank}", decode(case, d, stages, to_decode[rank][0], rank).run, ()))
    router = Router([b for _, b in to_decode], [b for _, b in to_prefill[1:]])
    ranks[0] = ("prefill 0", prefill(case, p, stages, router, 0).run, ())
    for rank in range(1, case.tp):
        ranks[2 * rank] = (
            f"prefill {rank}",
            prefill(case, p, stages, to_prefill[rank][0], rank).run,
            (),
        )
    run_ranks(ranks, 60)


class Router:
    """Hands what prefill's first rank sends to its siblings first, and then to decode's ranks."""

    def __init__(self, decode: List[Any], siblings: List[Any]) -> None:
        self.targets = siblings + decode

    def send(self, what: Any) -> None:
        self.targets.pop(0).send(what)


CASES = {
    "prefill_first": Case(),
    "two_ranks": Case(tp=2),
    "cached_at_decode": Case(tp=2, dcp=2, cached=320),
    "page_groups": Case(window=100, cached=48),
    "layerwise_save": Case(tp=2, dcp=2, layerwise=True),
    "dcp_interleave_1": Case(tp=4, dcp=4),
    "dcp_interleave_4": Case(tp=4, dcp=4, interleave=4),
    "dcp_interleave_block": Case(tp=4, dcp=4, interleave=BLOCK),
}


@pytest.mark.parametrize("name", CASES)
def test_case(rig, name):
    play(rig, CASES[name])


# ---- leases --------------------------------------------------------------------------------------


@pytest.fixture
def short_lease(monkeypatch):
    monkeypatch.setattr(vllm_connector, "LEASE_MS", 1000)


class QueuedDecode(Decode):
    def run(self) -> None:
        self.start()
        for _ in range(6):  # longer than two leases
            self.s.renew()
            time.sleep(0.35)
        self.load()
        self.received()
        self.check()


def test_a_queued_request_renews(rig, short_lease):
    play(rig, Case(), decode=QueuedDecode)


class VainPrefill(Prefill):
    """Nobody comes: its blocks are "sent" all the same."""

    error: Any = kvpack.LeaseError

    def run(self) -> None:
        self.start()
        self.s.add_prefill(REQUEST)
        self.steps()
        self.publish()
        self.until(lambda: self.w.get_finished()[0] == {REQUEST})
        with pytest.raises(self.error):
            self.w.sending[REQUEST].wait(SECS)
        self.w.sending[REQUEST].wait_released(SECS)
        self.stages.set(GONE)


class LateDecode(Decode):
    def run(self) -> None:
        self.start()
        self.stages.wait(GONE)
        self.w.shutdown()


def test_a_lease_that_ends(rig, short_lease):
    play(rig, Case(), VainPrefill, LateDecode)


class DeclinedPrefill(VainPrefill):
    error = kvpack.DeclinedError


class DecliningDecode(Decode):
    def run(self) -> None:
        self.start()
        self.s.cancel(REQUEST)
        self.stages.wait(GONE)


def test_a_cancelled_request_is_declined(rig):
    play(rig, Case(), DeclinedPrefill, DecliningDecode)


# ---- preemption ----------------------------------------------------------------------------------


class RecallingPrefill(Prefill):
    """Preempted after three steps: its blocks from the second on go, and are computed again."""

    def run(self) -> None:
        self.start()
        self.s.add_prefill(REQUEST)
        self.steps(0, 3 * STEP)
        first = self.w.handle_preemptions(REQUEST, 1)
        assert first == 1  # nobody has come, so none was packed
        for array in self.arrays():
            array[:] = 0xEE
        self.compute(0, STEP)
        self.steps(STEP)
        self.publish()
        self.finish()


def test_preempted_and_recalled(rig):
    play(rig, Case(), RecallingPrefill)


class StalledPrefill(Prefill):
    """Computes two steps, then nothing comes any more."""

    def run(self) -> None:
        self.start()
        self.s.add_prefill(REQUEST)
        self.steps(0, 2 * STEP)
        self.publish()
        with pytest.raises(kvpack.AbortedError, match="preempted"):
            self.w.sending[REQUEST].wait(SECS)
        self.w.sending[REQUEST].wait_source_free(2, SECS)


class PreemptedDecode(Decode):
    """Preempted while it loads: what has arrived is a prefix, the blocks behind it are errors."""

    def run(self) -> None:
        self.start()
        self.load()
        room, load = self.w.receiving[REQUEST]
        self.until(lambda: (self.w.client.process(), room.state.arrived)[1] == 2 * STEP)
        room.abort("preempted")
        self.received()
        errors = self.w.get_block_ids_with_load_errors()
        assert errors == {(0, block) for block in self.blocks[0][2 * STEP // BLOCK :]}
        self.check(arrived=2 * STEP)


def test_decode_preempted(rig):
    play(rig, Case(), StalledPrefill, PreemptedDecode)
