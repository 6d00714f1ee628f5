# SPDX-License-Identifier: Apache-2.0
"""Fences: words that say when rows may be read."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import TYPE_CHECKING, Any, List, NamedTuple, Optional, Type

from . import _abi
from .errors import InvalidError, UnsupportedError

if TYPE_CHECKING:
    from .client import Client


class FencePoint(NamedTuple):
    """What a chunk waits for: its rows may be read when the word has reached the value."""

    fence: "Fence"
    word: int
    value: int


def _torch_with_cuda() -> Any:
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(f"fences from streams need torch: {error}") from None
    if not torch.cuda.is_available():
        raise UnsupportedError("fences from streams need a CUDA device; torch sees none")
    return torch


class Fence:
    """Timeline words, shared with the daemon; one word for each stream that writes KV.

    ``point = fence.next()`` before the work is started, submit chunks with it, and
    ``fence.signal(point)`` when the rows are written. Values only grow.
    """

    def __init__(self, client: "Client", words: int = 1) -> None:
        handle = ctypes.c_void_p()
        client._call("kvp_fence_create", words, ctypes.byref(handle))
        self.client = client
        self.n_words = words
        self._handle: Optional[int] = handle.value
        self._values: List[int] = [0] * words
        self._is_mapped = False  # to a device
        client._fences.add(self)

    def next(self, word: int = 0) -> FencePoint:
        """The next point of a word's timeline."""
        self._check(word)
        self._values[word] += 1
        return FencePoint(self, word, self._values[word])

    def signal(self, point: FencePoint) -> None:
        """Everything written before by this thread is readable by the daemon."""
        self._check(point.word)
        _abi.lib().kvp_fence_signal(self._handle, point.word, point.value)

    def signal_on_stream(self, point: FencePoint, stream: Any = None) -> None:
        """The same, by a CUDA stream when it gets there (a torch stream; None: the current one).

        Raises UnsupportedError where torch or CUDA is not there.
        """
        self._check(point.word)
        torch = _torch_with_cuda()
        if stream is None:
            stream = torch.cuda.current_stream()
        if not self._is_mapped:
            with torch.cuda.device(stream.device):
                torch.cuda.current_stream().query()  # makes the device's context current
                self._call("kvp_fence_map_device")
            self._is_mapped = True
        handle = ctypes.c_void_p(stream.cuda_stream)
        self._call("kvp_fence_stream_signal", point.word, point.value, handle)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(_abi.lib(), name)(self._handle, *arguments)
        if code < 0:
            raise self.client._error(-code)

    def value(self, word: int = 0) -> int:
        """What the word says now."""
        self._check(word)
        return ctypes.c_uint64.from_address(self.address + 8 * word).value

    @property
    def address(self) -> int:
        """Of the words, 8 bytes each, for producers that write them by other means."""
        self._check(0)
        address = _abi.lib().kvp_fence_words(self._handle)
        assert address
        return int(address)

    def destroy(self) -> None:
        """Only when no submitted chunk waits for it. Twice is fine."""
        if self._handle is None:
            return
        _abi.lib().kvp_fence_destroy(self._handle)
        self._client_gone()

    def _client_gone(self) -> None:
        self._handle = None
        self.client._fences.discard(self)

    def _check(self, word: int) -> None:
        if self._handle is None:
            raise InvalidError("the fence has been destroyed")
        if not 0 <= word < self.n_words:
            raise InvalidError(f"word is {word}, the fence has {self.n_words}")

    def __enter__(self) -> "Fence":
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.destroy()
