# SPDX-License-Identifier: Apache-2.0
"""Real daemons in a private directory, and ranks as processes of their own.

The programs are those in $KVP_BIN; the library is the one in $KVPACK_LIBRARY.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from typing import Any, Callable, Dict, List, Optional, Tuple

import kvpack

CONFIG = """[node]
name = {name}
[client]
socket = {socket}
mode = 0600
group =
[peer]
listen = 127.0.0.1:0
heartbeat = 200ms
lost_after = 3s
{extra}
"""

processes = multiprocessing.get_context("fork")


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Daemon:
    """A kvpackd. ``address`` is what expectations name."""

    def __init__(self, directory: str, name: str, extra: str = "") -> None:
        self.name = name
        self.socket = f"{directory}/{name}.sock"
        self.log = f"{directory}/{name}.log"
        self._config = f"{directory}/{name}.conf"
        with open(self._config, "w") as file:
            file.write(CONFIG.format(name=name, socket=self.socket, extra=extra))
        self.start()

    def start(self) -> None:
        program = os.path.join(os.environ["KVP_BIN"], "kvpackd")
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [program, "--config", self._config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        until = time.monotonic() + 20
        while True:
            try:
                with kvpack.Client(self.socket, name="rig", timeout=5) as client:
                    self.address = client.node_address
                    return
            except kvpack.KvpackError as error:
                if self.process.poll() is not None or time.monotonic() > until:
                    raise AssertionError(f"{self.name}: {error}\n{self.text()}") from None
            time.sleep(0.01)

    def stop(self) -> int:
        """As systemd would; the exit status."""
        self.process.terminate()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def text(self) -> str:
        with open(self.log, errors="replace") as log:
            return log.read()


class Rig:
    """Daemons by name; as a context manager it stops them, and they must exit with 0."""

    def __init__(self) -> None:
        self.dir = tempfile.mkdtemp(prefix="kvp-py-")
        self.daemons: Dict[str, Daemon] = {}

    def daemon(self, name: str, extra: str = "") -> Daemon:
        if name not in self.daemons:
            self.daemons[name] = Daemon(self.dir, name, extra)
        return self.daemons[name]

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        results = {daemon.name: daemon.stop() for daemon in self.daemons.values()}
        logs = {daemon.name: daemon.text() for daemon in self.daemons.values()}
        shutil.rmtree(self.dir)
        if kind is not None:
            for name, text in logs.items():
                print(f"---- {name}\n{text}")
        else:
            assert not any(results.values()), f"exit status {results}\n{logs}"


class Stages:
    """Numbers that processes wait for: a stage only grows."""

    def __init__(self, n: int = 16) -> None:
        self._values = processes.Array(ctypes.c_uint64, n)

    def set(self, stage: int, value: int = 1) -> None:
        self._values[stage] = value

    def wait(self, stage: int, value: int = 1, secs: float = 20) -> None:
        until = time.monotonic() + secs
        while self._values[stage] < value:
            assert time.monotonic() < until, f"stage {stage} is {self._values[stage]}, not {value}"
            time.sleep(0.001)


Rank = Tuple[str, Callable[..., Any], Tuple[Any, ...]]


def _rank_main(pipe: Any, fn: Callable[..., Any], args: Tuple[Any, ...]) -> None:
    die_with_parent()
    try:
        pipe.send((fn(*args), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def run_ranks(ranks: List[Rank], secs: float = 60) -> List[Any]:
    """Runs fn(*args) of each rank in a process of its own; what they returned."""
    running = []
    for name, fn, args in ranks:
        ours, theirs = processes.Pipe(duplex=False)
        process = processes.Process(target=_rank_main, args=(theirs, fn, args), name=name)
        process.start()
        theirs.close()
        running.append((process, ours))
    until = time.monotonic() + secs
    results, wrong = [], []
    for process, pipe in running:
        result, error = None, "has not ended"
        if pipe.poll(max(until - time.monotonic(), 0.01)):
            try:
                result, error = pipe.recv()
            except EOFError:
                error = "died"
        if error:
            wrong.append(f"{process.name}: {error}")
            until = min(until, time.monotonic() + 2)
        results.append(result)
    for process, _ in running:
        process.join(0.5 if not wrong else 0.1)
        if process.is_alive():
            process.kill()
            process.join()
    assert not wrong, "\n".join(wrong)
    return results


def poll_until(fn: Callable[[], Optional[Any]], secs: float = 20) -> Any:
    """Calls fn until it gives something true."""
    until = time.monotonic() + secs
    while True:
        value = fn()
        if value:
            return value
        assert time.monotonic() < until, "not in time"
        time.sleep(0.002)
