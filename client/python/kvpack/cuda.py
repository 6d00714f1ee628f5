# SPDX-License-Identifier: Apache-2.0
"""Fence words written by a CUDA stream. The driver is loaded when this is first used."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from .errors import CallError, UnsupportedError


@functools.lru_cache(maxsize=None)
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedError(f"fences from streams need the CUDA driver: {error}") from None


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(f"fences from streams need torch: {error}") from None
    if not torch.cuda.is_available():
        raise UnsupportedError("fences from streams need a CUDA device; torch sees none")
    return torch


def _check(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        raise CallError(f"{name}: {(text.value or b'unknown').decode()}", code)


class StreamWriter:
    """Registers host words with the driver and writes them in stream order."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._torch = _torch()
        self._torch.cuda.init()
        self._torch.cuda.current_stream().synchronize()  # makes the context current
        self._address = ctypes.c_void_p(address)
        device = ctypes.c_uint64()
        mapped = 2  # CU_MEMHOSTREGISTER_DEVICEMAP
        _check("cuMemHostRegister_v2", self._address, ctypes.c_size_t(nbytes), mapped)
        _check("cuMemHostGetDevicePointer_v2", ctypes.byref(device), self._address, 0)
        self._device = device.value

    def write(self, offset: int, value: int, stream: Any) -> None:
        handle = (stream or self._torch.cuda.current_stream()).cuda_stream
        _check(
            "cuStreamWriteValue64_v2",  # with flags 0 it waits for all writes before it
            ctypes.c_void_p(handle),
            ctypes.c_uint64(self._device + offset),
            ctypes.c_uint64(value),
            0,
        )

    def close(self) -> None:
        self._torch.cuda.synchronize()  # no write may be on its way to words that go
        _check("cuMemHostUnregister", self._address)
