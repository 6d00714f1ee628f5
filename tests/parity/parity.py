# SPDX-License-Identifier: Apache-2.0
"""Does a model say the same when its cache was moved by kvpack?

Runs prompts through a prefill engine and a decode engine in processes of their own, behind one
daemon each, and compares tokens and log-probabilities with those of the model in one process.

  parity.py            everything: all shapes, lengths, prefixes, needles, faults
  parity.py --quick    a few of each
  parity.py --place P  where caches are: numpy arrays (the default) or torch tensors on a GPU
  parity.py --fault K  spoils what has arrived (engine.Fault says how): must end with status 1
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Optional

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # many processes, few cores
TOP = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / "client/python"), str(TOP / "client/python/tests")]

import numpy as np  # noqa: E402

from arrays import PLACES  # noqa: E402
from engine import Fault, Group, Request, Shape, Sources, run_decode, run_prefill  # noqa: E402
from model import NEEDLES, QUESTION  # noqa: E402
from monolithic import Answer, Monolithic  # noqa: E402
from rig import Daemon, Rig, processes, run_ranks  # noqa: E402
from rowformat import FORMATS  # noqa: E402

FAULTS = ["swap", "shift", "draft", "state"]
TOLERANCE = 1e-5  # of log-probabilities
CONFIG = "[host]\nslots = 8\nslot_bytes = 64k\n"
UNPACKED = "[lane]\npack = off\n"
GPU = "[gpu]\ndevices = all\nslots = 8\nslot_bytes = 64k\n"


class Verdict(NamedTuple):
    """worst: largest difference of a log-probability, of model or draft, at any rank."""

    worst: float
    wrong: List[str]


# ---- what is asked -------------------------------------------------------------------------------


def lengths(shape: Shape) -> List[int]:
    """Nine prompt lengths around the ends of virtual pages and of prefill's chunks."""
    width, chunk = shape.width, shape.chunk
    around = [width, chunk, 2 * width + chunk]
    return [n + d for n in around for d in (-1, 0, 1)]


def requests_of(shape: Shape, some: Optional[int] = None) -> List[Request]:
    """Each length without a prefix, and with the longest that decode can have."""
    requests = []
    chosen = lengths(shape)[:: some or 1]
    for number, length in enumerate(chosen):
        rng = np.random.default_rng([7, shape.dcp_size, shape.interleave, number])
        prompt = rng.integers(0, NEEDLES[0], length).tolist()
        requests.append(Request(2 * number + 1, prompt))
        prefix = (length - 1) // shape.width * shape.width
        if prefix:
            requests.append(Request(2 * number + 2, prompt, prefix))
    return requests


def needle_requests(shape: Shape, length: int = 201) -> List[Request]:
    """A needle at three depths, and a prompt without: the question comes behind the prompt."""
    requests = []
    for number, depth in enumerate((0.1, 0.5, 0.9, None)):
        prompt = np.random.default_rng(8).integers(0, NEEDLES[0], length).tolist()
        if depth is not None:
            prompt[int(depth * length)] = NEEDLES[2 * number + 1]
        requests.append(Request(number + 1, prompt, steps=3, forced=QUESTION))
    return requests


def check_needles(requests: List[Request], answers: List[Answer]) -> List[str]:
    wrong = []
    for request, answer in zip(requests, answers):
        hidden = [token for token in request.prompt if token in NEEDLES]
        said = answer.tokens[1]
        if hidden and said != hidden[0]:
            at = request.prompt.index(hidden[0])
            wrong.append(f"the needle {hidden[0]} at {at} was not found: {said}")
        if not hidden and said in NEEDLES:
            wrong.append(f"a needle was found where none is: {said}")
    return wrong


# ---- running -------------------------------------------------------------------------------------


def groups_of(n: int) -> List[Group]:
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(n - 1)]
    return [Group([a for a, _ in pairs], True)] + [Group([b], False) for _, b in pairs]


def run_engines(
    shape: Shape, nodes: List[Daemon], requests: List[Request], fault: Fault
) -> List[List[Answer]]:
    """[decode rank][request]"""
    pipes = [processes.Pipe(duplex=False) for _ in range(shape.stages - 1)]
    befores = [None] + [pipe[0] for pipe in pipes]
    behinds = [pipe[1] for pipe in pipes] + [None]
    sources = Sources(nodes[0].address, shape.stages, shape.dcp_size)
    ranks: List[Any] = []
    for stage in range(shape.stages):
        args = (shape, stage, nodes[0].socket, befores[stage], behinds[stage], requests)
        ranks.append((f"prefill {stage}", run_prefill, args))
    for rank, group in enumerate(groups_of(shape.dcp_size)):
        args = (shape, rank, nodes[1].socket, sources, group, fault, requests)
        ranks.append((f"decode {rank}", run_decode, args))
    return run_ranks(ranks, secs=120)[shape.stages :]


def run_reference(shape: Shape, requests: List[Request]) -> List[Answer]:
    weights = shape.weights()
    return [
        Monolithic(weights, shape.fmt).run(np.array(r.prompt), r.steps, r.forced) for r in requests
    ]


def compare(shape: Shape, requests: List[Request], ranks: List[List[Answer]]) -> Verdict:
    reference = run_reference(shape, requests)
    worst, wrong = 0.0, []
    for rank, answers in enumerate(ranks):
        for request, answer, expected in zip(requests, answers, reference):
            name = f"rank {rank}, {len(request.prompt)} tokens, prefix {request.prefix}"
            if answer.tokens != expected.tokens:
                wrong.append(f"{name}: tokens {answer.tokens}, not {expected.tokens}")
            for what in ("log_probs", "draft_log_probs"):
                off = float(np.abs(getattr(answer, what) - getattr(expected, what)).max())
                worst = max(worst, off)
                if not off <= TOLERANCE:  # NaN is wrong, too
                    wrong.append(f"{name}: {what} differ by {off:.2g}")
    if shape.needle:
        wrong += check_needles(requests, ranks[0])
    return Verdict(worst, wrong)


def run_shape(
    shape: Shape, nodes: List[Daemon], requests: List[Request], fault: Fault
) -> Verdict:
    return compare(shape, requests, run_engines(shape, nodes, requests, fault))


def shapes(quick: bool, fault: str) -> Iterator[Shape]:
    """How the engines are built: all combinations, or a few."""
    if quick or fault:
        yield Shape(FORMATS["fp8"], 4, 1, 2)
        if not fault:
            yield Shape(FORMATS["float32"], 2, 8, 1)
        return
    for dcp_size in (1, 2, 4, 8):
        for interleave in (1, 8) if dcp_size > 1 else (1,):
            for fmt in FORMATS.values():
                for stages in (1, 2):
                    yield Shape(fmt, dcp_size, interleave, stages)


def needle_shapes(quick: bool) -> Iterator[Shape]:
    for dcp_size, interleave in [(4, 1)] if quick else [(1, 1), (2, 8), (4, 1), (8, 8)]:
        yield Shape(FORMATS["fp8"], dcp_size, interleave, 2, needle=True)


class Report:
    def __init__(self) -> None:
        self.failed = self.requests = 0
        self.start = time.monotonic()

    def add(self, name: str, n: int, verdict: Verdict) -> None:
        self.requests += n
        self.failed += bool(verdict.wrong)
        word = "FAIL" if verdict.wrong else "ok"
        print(f"{word:4} {name}: {n} requests, log-probabilities within {verdict.worst:.1e}")
        for line in verdict.wrong[:5]:
            print(f"     {line}")
        sys.stdout.flush()

    def end(self) -> int:
        secs = time.monotonic() - self.start
        print(f"{self.requests} requests in {secs:.0f} s: {self.failed or 'nothing'} failed")
        return 1 if self.failed else 0


class Checks:
    """What is run, on two daemons, with caches in one place."""

    def __init__(self, rig: Rig, place: str) -> None:
        self.rig, self.place = rig, place
        if place != "numpy":
            import torch  # noqa: F401  once here, not in each process
        self.config = CONFIG + (GPU if place == "cuda" else "")
        self.nodes = [rig.daemon(name, self.config) for name in ("prefill", "decode")]
        self.report = Report()

    def one(
        self,
        shape: Shape,
        requests: List[Request],
        name: str = "",
        nodes: Optional[List[Daemon]] = None,
        fault: str = "",
    ) -> None:
        shape = replace(shape, place=self.place)
        verdict = run_shape(shape, nodes or self.nodes, requests, Fault(fault))
        self.report.add(f"{name}{shape}", len(requests), verdict)

    def matrix(self, quick: bool, fault: str) -> None:
        for shape in shapes(quick, fault):
            self.one(shape, requests_of(shape, 4 if quick else None), fault=fault)

    def needles(self, quick: bool) -> None:
        for shape in needle_shapes(quick):
            self.one(shape, needle_requests(shape))

    def ways(self) -> None:
        """Other ways that rows take: within a daemon, one by one, in more than one piece."""
        usual, long = Shape(FORMATS["fp8"], 4, 1, 2), Shape(FORMATS["float32"], chunk=240)
        self.one(usual, requests_of(usual), "one daemon: ", [self.nodes[0]] * 2)
        unpacked = [self.rig.daemon("unpacked", self.config + UNPACKED), self.nodes[1]]
        self.one(usual, requests_of(usual), "unpacked: ", unpacked)
        self.one(long, requests_of(long), "chunks of two slots: ")

    def faults(self) -> None:
        """A comparison that does not see a misplaced row proves nothing."""
        shape = Shape(FORMATS["fp8"], 2, 1, 1, place=self.place)
        requests = requests_of(shape, 4)[1:3]
        for kind in FAULTS:
            verdict = run_shape(shape, self.nodes, requests, Fault(kind))
            missed = [] if len(verdict.wrong) >= len(requests) else ["it did not show"]
            name = f"a fault on purpose ({kind}) shows"
            self.report.add(name, len(requests), Verdict(verdict.worst, missed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--fault", choices=FAULTS, default="")
    parser.add_argument("--place", choices=PLACES, default="numpy")
    options = parser.parse_args()
    with Rig() as rig:
        checks = Checks(rig, options.place)
        quick = options.quick or bool(options.fault)
        checks.matrix(quick, options.fault)
        if not options.fault:
            checks.needles(quick)
            checks.faults()
        if not quick:
            checks.ways()
        return checks.report.end()


if __name__ == "__main__":
    sys.exit(main())
