# SPDX-License-Identifier: Apache-2.0
"""The connection of one engine process to its node's kvpackd."""

from __future__ import annotations

import ctypes
import itertools
import json
import time
import weakref
from types import TracebackType
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Type

from . import _abi
from .errors import InvalidError, KvpackError, Status, WaitTimeout, error_of, error_of_call
from .fence import Fence
from .pool import Entry, Pool, distinct, mems_of
from .room import Expect, Open, PackedExpect, PackedOpen, Room, RoomState, state_of

Done = Callable[[Optional[KvpackError]], None]

_SLICE_MS = 200  # a wait in C returns so often, so that a signal is handled


class Client:
    """Used by one thread at a time; different clients are independent.

    ``socket``: None is $KVPACK_SOCKET, else /run/kvpack/sock. ``timeout``: seconds that a blocking
    call waits for the daemon. ``observer``: inspect() and drain() are all that is called, and it
    gets in when other clients have taken all connections. Functions that are given ``done`` return
    at once; done(error or None) is called by process() or by another call that waits.
    """

    def __init__(
        self,
        socket: Optional[str] = None,
        *,
        name: Optional[str] = None,
        timeout: float = 10.0,
        reconnect: bool = True,
        observer: bool = False,
    ) -> None:
        self._handle: Optional[int] = None
        self._fences: Set[Fence] = set()
        self._rooms: "weakref.WeakValueDictionary[int, Room]" = weakref.WeakValueDictionary()
        self._done: Dict[int, Done] = {}
        self._done_keys = itertools.count(1)
        self._raised: List[BaseException] = []
        self._progress: Optional[Callable[[], None]] = None
        # The library calls this one function; the argument says whose answer it is.
        self._done_fn = _abi.DoneFn(self._answered)
        self._no_done = ctypes.cast(0, _abi.DoneFn)
        options = _abi.kvp_client_options(size=ctypes.sizeof(_abi.kvp_client_options))
        options.socket = socket.encode() if socket is not None else None
        options.name = name.encode() if name is not None else None
        options.timeout_ms = max(int(timeout * 1000), 1)
        options.no_reconnect = not reconnect
        options.observer = observer
        handle = ctypes.c_void_p()
        code = _abi.lib().kvp_client_open(ctypes.byref(handle), ctypes.byref(options))
        if code < 0:
            raise self._error(-code)
        self._handle = handle.value

    # ---- ends

    @property
    def closed(self) -> bool:
        return self._handle is None

    def close(self) -> None:
        """The daemon drops pools and fails rooms of this client. Twice is fine."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        for fence in list(self._fences):
            fence._client_gone()
        _abi.lib().kvp_client_close(handle)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()

    # ---- the node

    @property
    def node_name(self) -> str:
        return str(_abi.lib().kvp_node_name(self._live()).decode())

    @property
    def node_address(self) -> str:
        """What expectations on other nodes name to reach senders here; "": no peers."""
        return str(_abi.lib().kvp_node_address(self._live()).decode())

    def drain(self, on: bool = True, reason: Optional[str] = None) -> None:
        """Empties the node: no new legs until drain(False). Administrators only."""
        self._call("kvp_drain", int(on), reason and reason.encode())

    def inspect(self, what: str = "status", arg: Optional[str] = None) -> Any:
        """The daemon's state: "status", "clients", "pools", "rooms", "waiting", "peers", ..."""
        text = ctypes.c_void_p()
        self._call("kvp_inspect", what.encode(), arg and arg.encode(), ctypes.byref(text))
        try:
            return json.loads(ctypes.string_at(text.value or 0))
        finally:
            _abi.libc().free(text)

    # ---- event loops

    def fileno(self) -> int:
        """Readable when process() has something to do; the same number for life."""
        return int(_abi.lib().kvp_client_fd(self._live()))

    @property
    def events(self) -> int:
        """What to poll the fd for."""
        return int(_abi.lib().kvp_client_events(self._live()))

    @property
    def poll_timeout(self) -> Optional[float]:
        """How long to poll at most; None: no limit."""
        ms = int(_abi.lib().kvp_client_timeout(self._live()))
        return None if ms < 0 else ms / 1000

    def process(self) -> int:
        """Does what can be done now, never blocks; how many answers and changes there were."""
        return self._call("kvp_process")

    def wait(self, timeout: Optional[float] = None) -> int:
        """process(), after waiting for something to process."""
        return self._wait_call("kvp_wait", timeout)

    def changed(self) -> Iterator[Room]:
        """Rooms whose state changed since they were last returned here."""
        while True:
            ident = _abi.lib().kvp_room_next_changed(self._live())
            if not ident:
                return
            room = self._rooms.get(ident)
            if room is not None:
                yield room

    # ---- requests

    def register(
        self, entries: Sequence[Entry], *, tag: bytes = b"", label: Optional[str] = None
    ) -> Pool:
        """Registers a pool; the daemon maps its memory."""
        memories = distinct(entries)
        numbers = {memory: i for i, memory in enumerate(memories)}
        descs = [entry._desc(numbers[entry.memory]) for entry in entries]
        desc = _abi.kvp_pool_desc(size=ctypes.sizeof(_abi.kvp_pool_desc))
        desc.entries = (_abi.kvp_entry_desc * max(len(descs), 1))(*descs)
        desc.n_entries = len(descs)
        desc.mems, desc.n_mems = mems_of(memories), len(memories)
        desc.layout_tag, desc.tag_bytes = tag, len(tag)
        desc.label = label.encode() if label is not None else None
        ident = ctypes.c_uint32()
        self._call("kvp_pool_register", ctypes.byref(desc), ctypes.byref(ident))
        return Pool(self, ident.value, entries)

    def fence(self, words: int = 1) -> Fence:
        """A fence of so many words."""
        return Fence(self, words)

    def expect(self, expect: Expect, done: Optional[Done] = None) -> Room:
        """Announces what this decode rank expects. A refusal with done fails the room, too."""
        packed = PackedExpect(expect)
        return self._room("kvp_expect", ctypes.byref(packed.c), expect.room, done)

    def open(self, open_: Open, done: Optional[Done] = None) -> Room:
        """Announces that this prefill rank will send."""
        packed = PackedOpen(open_)
        return self._room("kvp_open", ctypes.byref(packed.c), open_.room, done)

    def renew(
        self,
        address: str,
        room: int,
        sender: int = 0,
        *,
        key: Optional[bytes] = None,
        lease_ms: int = 0,
        done: Optional[Done] = None,
    ) -> None:
        """Decode, before expect(): prolongs the lease of a sender's open."""
        self._request("kvp_renew", address.encode(), room, key, sender, lease_ms, done=done)

    def decline(
        self,
        address: str,
        room: int,
        sender: int = 0,
        *,
        key: Optional[bytes] = None,
        reason: str = "",
        done: Optional[Done] = None,
    ) -> None:
        """Decode, before expect(): says that nobody will come."""
        self._request(
            "kvp_decline", address.encode(), room, key, sender, reason.encode(), done=done
        )

    # ---- inside

    def _live(self) -> int:
        if self._handle is None:
            raise InvalidError("the client has been closed")
        return self._handle

    def _error(self, code: int) -> KvpackError:
        text = _abi.lib().kvp_last_error(self._handle) or b""
        status = _abi.lib().kvp_last_status(self._handle)
        return error_of_call(code, status, text.decode(errors="replace"))

    def _call(self, name: str, *arguments: Any) -> int:
        """Calls the library; a negative result and what done functions raised become exceptions."""
        code = int(getattr(_abi.lib(), name)(self._live(), *arguments))
        if self._progress is not None:
            self._progress()
        if self._raised:
            raise self._raised.pop(0)
        if code < 0:
            raise self._error(-code)
        return code

    def _wait_call(self, name: str, timeout: Optional[float], *arguments: Any) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _SLICE_MS
            if until is not None:
                left = min(left, max(int((until - time.monotonic()) * 1000), 0))
            try:
                return self._call(name, *arguments, left)
            except WaitTimeout:
                if until is not None and time.monotonic() >= until:
                    raise WaitTimeout(f"not after {timeout:g} s") from None

    def _answered(self, key: int, status: int, text: bytes) -> None:
        done = self._done.pop(key)
        try:
            done(error_of(status, text.decode(errors="replace")) if status else None)
        except BaseException as error:  # cannot pass through C: raised by _call() instead
            self._raised.append(error)

    def _request(self, name: str, *arguments: Any, done: Optional[Done], out: Any = None) -> None:
        """A call with done and its argument, and an output behind them."""
        tail = () if out is None else (out,)
        if done is None:
            self._call(name, *arguments, self._no_done, None, *tail)
            return
        key = next(self._done_keys)
        self._done[key] = done
        try:
            self._call(name, *arguments, self._done_fn, key, *tail)
        except KvpackError:
            self._done.pop(key, None)
            raise

    def _room(self, name: str, argument: Any, number: int, done: Optional[Done]) -> Room:
        ident = ctypes.c_uint64()
        self._request(name, argument, done=done, out=ctypes.byref(ident))
        room = self._rooms[ident.value] = Room(self, ident.value, number)
        return room

    def _room_state(self, ident: int) -> RoomState:
        state = _abi.kvp_room_state(size=ctypes.sizeof(_abi.kvp_room_state))
        code = _abi.lib().kvp_room_state(self._live(), ident, ctypes.byref(state))
        if code < 0:
            raise error_of_call(-code, Status.NOT_FOUND, f"room end {ident} is not known")
        return state_of(state)

    def _forget(self, ident: int) -> None:
        if self._handle is not None:
            _abi.lib().kvp_room_forget(self._handle, ident)
