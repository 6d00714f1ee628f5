# SPDX-License-Identifier: Apache-2.0
"""A client in an asyncio loop: the loop watches its fd, and coroutines wait for rooms."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Callable, List, Optional, Tuple, Type, TypeVar

from .client import Client, Done
from .errors import BusyError, CancelledError, KvpackError
from .room import Chunk, Expect, Open, Room, RoomState

_T = TypeVar("_T")
_Waiter = Tuple[Room, Callable[[RoomState], bool], "asyncio.Future[RoomState]"]


class AsyncClient:
    """Wraps a Client for the loop that enters it::

        async with AsyncClient("/run/kvpack/sock") as client:
            room = await client.open(kvpack.Open(...))
            await client.ready(room)

    Everything else is called on ``client.client``. Waits raise the room's error when it failed;
    limit their time with asyncio.wait_for().
    """

    def __init__(self, socket: Optional[str] = None, **options: Any) -> None:
        self._socket = socket
        self._options = options
        self._waiters: List[_Waiter] = []
        self._scheduled = False
        self.client: Client

    async def __aenter__(self) -> "AsyncClient":
        self._loop = asyncio.get_running_loop()
        self.client = await asyncio.to_thread(Client, self._socket, **self._options)
        self._fd = self.client.fileno()
        self.client._progress = self._schedule
        self._loop.add_reader(self._fd, self._turn)
        self._schedule()
        return self

    async def __aexit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self._loop.remove_reader(self._fd)
        self.client._progress = None
        self.client.close()
        for _, _, future in self._waiters:
            if not future.done():
                future.set_exception(CancelledError("the client has been closed"))

    # ---- requests

    async def expect(self, expect: Expect) -> Room:
        return await self._request(lambda done: self.client.expect(expect, done))

    async def open(self, open_: Open) -> Room:
        return await self._request(lambda done: self.client.open(open_, done))

    async def submit(self, room: Room, chunk: Chunk) -> int:
        """Its number, when the daemon has accepted it."""
        return await self._request(lambda done: room.submit(chunk, done))

    async def _request(self, start: Callable[[Done], _T]) -> _T:
        answer: "asyncio.Future[None]" = self._loop.create_future()

        def done(error: Optional[KvpackError]) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)

        while True:
            try:
                result = start(done)
                break
            except BusyError:
                await asyncio.sleep(0.001)
        await answer
        return result

    # ---- waits

    async def ready(self, room: Room) -> RoomState:
        """Prefill: all destinations are there; decode: all senders are."""
        return await self._until(room, lambda s: s.phase not in (1, 8))

    async def complete(self, room: Room) -> RoomState:
        """Every byte is in place (prefill: decode said so)."""
        return await self._until(room, lambda s: s.complete)

    async def arrived(self, room: Room, tokens: int) -> RoomState:
        """Decode: tokens [0, tokens) are present in all entries."""
        return await self._until(room, lambda s: s.arrived >= tokens)

    async def delivered(self, room: Room, chunks: int) -> RoomState:
        """Prefill: the first chunks have landed at every destination."""
        return await self._until(room, lambda s: s.delivered >= chunks)

    async def source_free(self, room: Room, chunks: int) -> RoomState:
        """Prefill: the first chunks may be overwritten; comes after a failure, too."""
        return await self._until(room, lambda s: s.source_free >= chunks, failure=False)

    async def released(self, room: Room) -> RoomState:
        """Pages may be reused; comes after a failure, too."""
        return await self._until(room, lambda s: s.released, failure=False)

    async def _until(
        self, room: Room, reached: Callable[[RoomState], bool], failure: bool = True
    ) -> RoomState:
        def over(state: RoomState) -> bool:
            return reached(state) or (failure and state.terminal) or state.released

        future: "asyncio.Future[RoomState]" = self._loop.create_future()
        waiter = (room, over, future)
        self._waiters.append(waiter)
        self._schedule()
        try:
            state = await future
        finally:
            self._waiters.remove(waiter)
        if not reached(state):
            state.raise_if_failed()
            raise CancelledError("the room ended without what was waited for")
        if failure and state.failed:
            state.raise_if_failed()
        return state

    # ---- turns

    def _schedule(self) -> None:
        """A call outside of _turn() may have brought changes that the fd will not tell again."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._wake)

    def _turn(self) -> None:
        self.client.process()

    def _wake(self) -> None:
        self._scheduled = False
        for room, over, future in list(self._waiters):
            if future.done():
                continue
            try:
                state = room.state
            except KvpackError as error:
                future.set_exception(error)
                continue
            if over(state):
                future.set_result(state)
