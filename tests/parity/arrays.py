# SPDX-License-Identifier: Apache-2.0
"""Where caches are: in host memory as numpy arrays, or on a GPU as torch tensors.

The engine writes and reads rows by (pages, slots); the model computes on the host.
"""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np

import kvpack

Array = Any


class OnHost:
    """All arrays of a rank, in one memory that the daemon maps."""

    def __init__(self, nbytes: int) -> None:
        self._memory = kvpack.Memory(nbytes)

    def take(self, shape: Tuple[int, ...], dtype: str = "uint8") -> Array:
        return self._memory.take(shape, dtype)

    def rows(self, n_pages: int, page_bytes: int, page: int, row_bytes: int) -> Array:
        """[pages, slots, bytes], with a gap behind each page that belongs to nobody."""
        pages = self.take((n_pages, page_bytes))
        strides = (page_bytes, row_bytes, 1)
        return np.lib.stride_tricks.as_strided(pages, (n_pages, page, row_bytes), strides)

    @staticmethod
    def entry(array: Array) -> Array:
        """What a pool is made of."""
        return array

    @staticmethod
    def signal(point: kvpack.FencePoint) -> None:
        point.fence.signal(point)

    @staticmethod
    def settle() -> None:
        """What was written is there now, for chunks without a fence."""


class Tensor:
    """A tensor that is read and written as a numpy array is."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.nbytes = tensor.numel() * tensor.element_size()

    def _place(self, place: Any) -> Any:
        import torch

        if not isinstance(place, tuple):
            return place
        return tuple(
            torch.as_tensor(np.ascontiguousarray(part), device=self.tensor.device)
            if isinstance(part, np.ndarray)
            else part
            for part in place
        )

    def __getitem__(self, place: Any) -> Array:
        return self.tensor[self._place(place)].cpu().numpy()

    def __setitem__(self, place: Any, value: Any) -> None:
        import torch

        if isinstance(value, np.ndarray):
            value = torch.from_numpy(np.ascontiguousarray(value)).to(self.tensor.device)
        self.tensor[self._place(place)] = value

    def __len__(self) -> int:
        return len(self.tensor)


class OnGpu:
    """The same as tensors that torch allocates, one by one, as engines do."""

    device = "cuda"

    def __init__(self, nbytes: int) -> None:
        del nbytes

    def _zeros(self, shape: Tuple[int, ...], dtype: str) -> Any:
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def take(self, shape: Tuple[int, ...], dtype: str = "uint8") -> Tensor:
        return Tensor(self._zeros(shape, dtype))

    def rows(self, n_pages: int, page_bytes: int, page: int, row_bytes: int) -> Tensor:
        pages = self._zeros((n_pages, page_bytes), "uint8")
        strides = (page_bytes, row_bytes, 1)
        return Tensor(pages.as_strided((n_pages, page, row_bytes), strides))

    @staticmethod
    def entry(array: Tensor) -> Any:
        return array.tensor

    @staticmethod
    def signal(point: kvpack.FencePoint) -> None:
        """Rows were written by the current stream: it signals behind them."""
        point.fence.signal_on_stream(point)

    @staticmethod
    def settle() -> None:
        import torch

        torch.cuda.current_stream().synchronize()


class OnCpu(OnGpu):
    """Tensors in host memory, to try all of that without a GPU."""

    device = "cpu"
    signal = staticmethod(OnHost.signal)
    settle = staticmethod(OnHost.settle)

    def _zeros(self, shape: Tuple[int, ...], dtype: str) -> Any:
        import torch

        return kvpack.alloc_tensor(shape, getattr(torch, dtype))[0]


PLACES = {"numpy": OnHost, "cuda": OnGpu, "torch-cpu": OnCpu}
