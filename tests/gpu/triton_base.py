# SPDX-License-Identifier: Apache-2.0
"""What a gather costs with the kernels that engines have: two in Triton, next to a copy.

byte-wise: an element is a byte; a program takes 1,024 of an entry; row numbers come from a list in
device memory. word-wise: tiles of 16 rows by up to 256 words of 4 bytes, one row number a row.
Both: all entries in one launch; one launch for all ranks, or one for each rank.

Every byte is compared with torch's own indexing first. Prints a line for each shape: the copy in
us, and each kernel as a fraction of it, measured as tests/gpu/gpu_sweep.c measures.
"""

import sys
import time

import torch
import triton
import triton.language as tl

REPEATS, ROUNDS = 8, 11
PAGE = 64
SHAPES = [  # entries, row bytes, tokens, ranks
    (7, 576, 2048, 4),
    (7, 576, 8192, 4),
    (14, 576, 8192, 4),
    (61, 576, 8192, 4),
    (61, 656, 8192, 4),
    (61, 1152, 8192, 4),
]


@triton.jit
def byte_rows(table, rows, n, pack, BLOCK: tl.constexpr):
    entry = tl.program_id(0)
    source = tl.load(table + entry * 3)
    width = tl.load(table + entry * 3 + 1)
    offset = tl.load(table + entry * 3 + 2)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n * width
    row = at // width
    index = tl.load(rows + row, mask=live, other=0)
    address = source + index * width + at % width
    data = tl.load(address.to(tl.pointer_type(tl.uint8)), mask=live, other=0)
    tl.store(pack + offset + at, data, mask=live)


@triton.jit
def word_rows(table, rows, n, pack, WORDS: tl.constexpr, COLS: tl.constexpr):
    entry = tl.program_id(0)
    source = tl.load(table + entry * 3)
    offset = tl.load(table + entry * 3 + 2) // 4
    row = tl.program_id(1) * 16 + tl.arange(0, 16)
    col = tl.program_id(2) * COLS + tl.arange(0, COLS)
    index = tl.load(rows + row, mask=row < n, other=0)
    live = (row < n)[:, None] & (col < WORDS)[None, :]
    words = tl.multiple_of(source, 16).to(tl.pointer_type(tl.uint32))
    data = tl.load(words + index[:, None] * WORDS + col[None, :], mask=live, other=0)
    packed = pack.to(tl.pointer_type(tl.uint32)) + offset
    tl.store(packed + row[:, None].to(tl.int64) * WORDS + col[None, :], data, mask=live)


def median_us(launch):
    """Of one launch. Eight on buffers in turns make a graph: the host's time does not count."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k in range(REPEATS):
            launch(k)
    times = []
    for i in range(ROUNDS + 2):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) * 1000 / REPEATS)
    return sorted(times)[ROUNDS // 2]


class Scene:
    def __init__(self, layers, width, tokens, ranks):
        self.layers, self.width, self.ranks = layers, width, ranks
        nbytes = layers * width * tokens
        self.sets = max(1, min(8, 800_000_000 // nbytes))
        shape = (self.sets, layers, tokens, width)
        self.pools = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        self.packs = torch.zeros((self.sets, nbytes), dtype=torch.uint8, device="cuda")
        order = torch.randperm(tokens // PAGE, device="cuda")
        rows = (order[:, None] * PAGE + torch.arange(PAGE, device="cuda")).flatten()
        self.each = [rows[rank::ranks].contiguous() for rank in range(ranks)]
        self.all = [torch.cat(self.each)]
        self.tables = {}

    def parts(self, split):
        """(row numbers, bytes in front of them) of each launch."""
        lists = self.each if split else self.all
        size = len(lists[0]) * self.layers * self.width
        return [(rows, i * size) for i, rows in enumerate(lists)]

    def table(self, k, n):
        """Source, width, place in the pack, for each entry; made once, as engines can."""
        if (k, n) not in self.tables:
            lines = [
                (self.pools[k, i].data_ptr(), self.width, i * n * self.width)
                for i in range(self.layers)
            ]
            self.tables[k, n] = torch.tensor(lines, dtype=torch.int64, device="cuda")
        return self.tables[k, n]

    def prepare(self):
        """All tables, since none can be made while a graph is captured."""
        for split in (False, True):
            for rows, _ in self.parts(split):
                for k in range(self.sets):
                    self.table(k, len(rows))

    def byte_wise(self, k, split):
        k %= self.sets
        for rows, front in self.parts(split):
            n = len(rows)
            grid = (self.layers, triton.cdiv(n * self.width, 1024))
            byte_rows[grid](self.table(k, n), rows, n, self.packs[k, front:], BLOCK=1024)

    def word_wise(self, k, split):
        k %= self.sets
        words = self.width // 4
        cols = min(256, triton.next_power_of_2(words))
        for rows, front in self.parts(split):
            n = len(rows)
            grid = (self.layers, triton.cdiv(n, 16), triton.cdiv(words, cols))
            word_rows[grid](
                self.table(k, n), rows, n, self.packs[k, front:], WORDS=words, COLS=cols
            )

    def copy(self, k):
        k %= self.sets
        self.packs[k].copy_(self.pools[k].view(-1))

    def check(self, launch, split):
        self.packs.zero_()
        launch(0, split)
        want = [
            self.pools[0, i][rows].flatten()
            for rows, _ in self.parts(split)
            for i in range(self.layers)
        ]
        assert torch.equal(self.packs[0], torch.cat(want)), launch.__name__


def main():
    print(f"{'entries x row, tokens, ranks':30} {'MB':>7} {'copy us':>8}", end="")
    print(f" {'bytes':>7} {'/rank':>7} {'words':>7} {'/rank':>7}   (fractions of the copy)")
    until = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else 100)
    for shape in SHAPES:
        if time.monotonic() > until:
            print("out of time")
            break
        scene = Scene(*shape)
        scene.prepare()
        copy = median_us(scene.copy)
        fractions = []
        for launch in (scene.byte_wise, scene.word_wise):
            for split in (False, True):
                scene.check(launch, split)
                us = median_us(lambda k, go=launch, each=split: go(k, each))
                fractions.append(copy / us)
        layers, width, tokens, ranks = shape
        name = f"{layers} x {width}, {tokens}, {ranks}"
        print(f"{name:30} {layers * width * tokens / 1e6:7.1f} {copy:8.2f}", end="")
        print("".join(f" {value:7.3f}" for value in fractions), flush=True)
        del scene
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
