# SPDX-License-Identifier: Apache-2.0
"""Real engines' processes as far as memory goes: torch allocates the caches, libkvpack is called
through ctypes, two daemons serve one GPU.

  torch_check.py caching      caches of the caching allocator
  torch_check.py expandable   the same with expandable segments

Moves rows between two daemons (landing over tcp) and within one, kills the producer and the consumer
in the middle of a room, and looks whether the GPU has its memory back. Each line begins with ok or
FAIL; the exit status says whether all were right.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

MODE = sys.argv[1] if len(sys.argv) > 1 else "caching"
if MODE == "expandable":  # before torch is loaded
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

TOP = os.path.abspath(os.path.join(os.path.dirname(__file__), ".."))
sys.path[:0] = [f"{TOP}/client/python", f"{TOP}/client/python/tests"]

import kvpack  # noqa: E402
import numpy as np  # noqa: E402
import rows  # noqa: E402
from rig import Rig, Stages, processes, run_ranks  # noqa: E402

CONFIG = "[gpu]\ndevices = all\nslots = 4\nslot_bytes = 1M\n"
LAYERS, PAGES, PAGE, BYTES = 3, 1200, 64, 576
END, CHUNK, DCP, SECS = 1000, 256, 2, 30
MIB = 1 << 20
HELD, READY = 0, 1  # READY + rank


def cache():
    """A cache, behind other tensors of its segment."""
    import torch

    others = [torch.zeros(3 * MIB + 512 * i, dtype=torch.uint8, device="cuda") for i in range(3)]
    kv = torch.zeros((LAYERS, PAGES, PAGE, BYTES), dtype=torch.uint8, device="cuda")
    return kv, others


def sides(room):
    source = kvpack.Side(PAGE, rows.some_pages(PAGES - 1, PAGES, room))
    pages = rows.some_pages(-(-END // (PAGE * DCP)), PAGES, room + 1)
    return source, [
        kvpack.Side(PAGE, pages, dcp_size=DCP, dcp_rank=rank) for rank in range(DCP)
    ]


def prefill(path, room, stages, stalls):
    """Submits chunks, then computes their rows; `stalls`: never gets that far."""
    import torch

    kv, others = cache()
    source = sides(room)[0]
    with kvpack.Client(path, name="prefill") as client:
        pool = kvpack.Pool.from_arrays(client, list(kv), page_size=PAGE)
        send = client.open(kvpack.Open(room, pool, [kvpack.Side(PAGE)]))
        fence = client.fence()
        send.wait_ready(SECS)
        computed = np.zeros(tuple(kv.shape), np.uint8)
        chunks = 0
        for start in range(0, END, CHUNK):
            stop = min(start + CHUNK, END)
            for layer in range(LAYERS):
                rows.put_rows(computed[layer], room, layer, source, start, stop)
            point = fence.next()
            side = kvpack.Side(PAGE, list(source.pages)[start // PAGE :], pos0=start)
            send.submit(
                kvpack.Chunk(start, stop - start, [side], fence=point, last=stop == END)
            )
            chunks += 1
            stages.set(HELD)
            if stalls:
                time.sleep(SECS)
            kv.copy_(torch.from_numpy(computed))
            fence.signal_on_stream(point)
        send.wait_source_free(chunks, SECS)
        send.wait(SECS)
        assert len(others) == 3


def decode(path, address, room, stages, rank, stalls):
    """Compares every byte, or says why the room failed."""
    kv, others = cache()
    side = sides(room)[1][rank]
    with kvpack.Client(path, name="decode") as client:
        pool = kvpack.Pool.from_arrays(client, list(kv), page_size=PAGE)
        sender = kvpack.Sender(address, n_dests=DCP)
        receive = client.expect(
            kvpack.Expect(room, pool, [side], [sender], end=END, dest=rank)
        )
        stages.set(READY + rank)
        if stalls:
            time.sleep(SECS)
        try:
            receive.wait(SECS)
        except kvpack.KvpackError as error:
            return f"{type(error).__name__}: {error}"
        receive.wait_released(SECS)
        expected = np.zeros(tuple(kv.shape), np.uint8)
        for layer in range(LAYERS):
            rows.put_rows(expected[layer], room, layer, side, 0, END)
        assert (kv.cpu().numpy() == expected).all(), "rows differ"
        assert all(int(other.max()) == 0 for other in others), "a neighbour was written"
        return ""


class Watch:
    """Free memory of the GPU, asked of a process that has nothing there but its context."""

    def __init__(self):
        self.pipe, theirs = processes.Pipe()
        self.process = processes.Process(target=self._main, args=(theirs,))
        self.process.start()

    @staticmethod
    def _main(pipe):
        import torch

        torch.zeros(1, device="cuda")
        while pipe.recv():
            pipe.send(torch.cuda.mem_get_info()[0])

    def free(self):
        self.pipe.send(True)
        return self.pipe.recv()

    def back(self, level, secs=1.0):
        """MiB that lack after so long at most, and how long it took."""
        start = time.monotonic()
        while True:
            lacks, took = max(level - self.free(), 0) // MIB, time.monotonic() - start
            if lacks <= 16 or took > secs:
                return lacks, took
            time.sleep(0.005)

    def end(self):
        self.pipe.send(False)
        self.process.join()


def moves(rig, local, room):
    here = rig.daemon("prefill", CONFIG)
    there = here if local else rig.daemon("decode", CONFIG)
    stages = Stages()
    ranks = [("prefill", prefill, (here.socket, room, stages, False))]
    for rank in range(DCP):
        args = (there.socket, here.address, room, stages, rank, False)
        ranks.append((f"decode {rank}", decode, args))
    said = run_ranks(ranks, SECS * 2)
    assert not any(said), said
    return "every byte right"


def spawn(fn, *args):
    process = processes.Process(target=fn, args=args)
    process.start()
    return process


def producer_dies(rig, watch):
    here, there = rig.daemon("prefill", CONFIG), rig.daemon("decode", CONFIG)
    stages = Stages()
    before = watch.free()
    killed = spawn(prefill, here.socket, 200, stages, True)
    ranks = [
        (f"decode {rank}", decode, (there.socket, here.address, 200, stages, rank, False))
        for rank in range(DCP)
    ]
    waiter = spawn(kill_at, killed.pid, stages)
    said = run_ranks(ranks, SECS * 2)
    killed.join()
    waiter.join()
    lacks, _ = watch.back(before, 3.0)
    assert all(said), f"decode was told nothing: {said}"
    assert lacks <= 16, f"{lacks} MiB have not come back"
    return f"decode was told: {said[0][:110]}"


def kill_at(pid, stages):
    stages.wait(HELD, secs=SECS)
    os.kill(pid, signal.SIGKILL)


def memory_of_the_dead(rig, watch):
    """How long after its death a producer's memory is back."""
    here = rig.daemon("prefill", CONFIG)
    stages = Stages()
    before = watch.free()
    killed = spawn(owner, here.socket, stages)
    stages.wait(HELD, secs=SECS)
    held = (before - watch.free()) // MIB
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    lacks, took = watch.back(before)
    assert lacks <= 16, f"{lacks} of {held} MiB have not come back in a second"
    return f"{held} MiB were back {took * 1000:.0f} ms after its death was seen"


def owner(path, stages):
    kv, others = cache()
    client = kvpack.Client(path, name="owner")
    pool = kvpack.Pool.from_arrays(client, list(kv), page_size=PAGE)
    stages.set(HELD)
    time.sleep(SECS)
    assert pool and others


def consumer_dies(rig, watch):
    here, there = rig.daemon("prefill", CONFIG), rig.daemon("decode", CONFIG)
    stages = Stages()
    before = watch.free()
    args = (there.socket, here.address, 300, stages)
    killed = [spawn(decode, *args, rank, True) for rank in range(DCP)]
    for rank in range(DCP):
        stages.wait(READY + rank, secs=SECS)
    sender = spawn(prefill_fails, here.socket, 300, stages)
    stages.wait(HELD, secs=SECS)
    for process in killed:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    sender.join(SECS)
    assert sender.exitcode == 0, "the sender was told nothing"
    lacks, took = watch.back(before, 3.0)
    assert lacks <= 16, f"{lacks} MiB have not come back"
    return "the sender was told"


def prefill_fails(path, room, stages):
    kv, others = cache()
    source = sides(room)[0]
    with kvpack.Client(path, name="prefill") as client:
        pool = kvpack.Pool.from_arrays(client, list(kv), page_size=PAGE)
        send = client.open(kvpack.Open(room, pool, [kvpack.Side(PAGE)]))
        fence = client.fence()
        side = kvpack.Side(PAGE, list(source.pages))
        send.submit(kvpack.Chunk(0, END, [side], fence=fence.next(), last=True))
        send.wait_ready(SECS)
        stages.set(HELD)
        try:
            send.wait(SECS)
        except kvpack.KvpackError:
            assert others
            return
    sys.exit(3)


def main():
    import torch  # once here, not in each process; the GPU is not touched

    bad = 0
    print(f"torch {torch.__version__}, {MODE} allocator")
    watch = Watch()
    start = watch.free()
    with Rig() as rig:
        checks = [
            ("landing between two daemons", lambda: moves(rig, False, 100)),
            ("local", lambda: moves(rig, True, 150)),
            ("a dead producer's memory", lambda: memory_of_the_dead(rig, watch)),
            ("producer killed in a room", lambda: producer_dies(rig, watch)),
            ("consumer killed in a room", lambda: consumer_dies(rig, watch)),
            ("landing, afterwards", lambda: moves(rig, False, 400)),
        ]
        for name, check in checks:
            try:
                said, word = check(), "ok"
            except BaseException:
                said, word = traceback.format_exc().strip(), "FAIL"
                bad += 1
            print(f"{word:5} torch, {MODE}: {name:30} {said}", flush=True)
    lacks, _ = watch.back(start, 5.0)
    word = "ok" if lacks <= 16 else "FAIL"
    print(f"{word:5} torch, {MODE}: GPU memory at the end: {lacks} MiB less than at the start")
    watch.end()
    return 1 if bad or lacks > 16 else 0


if __name__ == "__main__":
    sys.exit(main())
