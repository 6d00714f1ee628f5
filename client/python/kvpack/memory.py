# SPDX-License-Identifier: Apache-2.0
"""Memory that a pool can live in: of the host, made here, or of a GPU, made by torch."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from . import _abi
from .errors import InvalidError, UnsupportedError, error_of_call

if TYPE_CHECKING:
    import numpy.typing as npt

    Shape = Union[int, Sequence[int]]

ALIGN = 256  # bytes; of each array that Memory.take() cuts

# What is mapped now, by address, so that the memory of a view can be found.
_mapped: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def _release(address: int, nbytes: int, fd: int) -> None:
    _abi.libc().munmap(address, nbytes)
    os.close(fd)


class Memory:
    """Host memory that the daemon can map: a sealable memfd.

    It lives as long as an array or tensor in it, or this object, is referenced.

    >>> memory = Memory(1 << 20)
    >>> k = memory.take((16, 64), "float32")
    >>> v = memory.take((16, 64), "float32")
    >>> Memory.of(v) == memory
    True
    """

    def __init__(self, nbytes: int, name: str = "kvpack") -> None:
        fd, address = ctypes.c_int(), ctypes.c_void_p()
        code = _abi.lib().kvp_memory_create(
            name.encode(), nbytes, ctypes.byref(fd), ctypes.byref(address)
        )
        if code < 0:
            raise error_of_call(-code, 0, f"memory of {nbytes} bytes: {os.strerror(-code)}")
        assert address.value
        # Arrays reference the mapping; when nothing does any more it is unmapped.
        self._mapping: Any = (ctypes.c_char * nbytes).from_address(address.value)
        self._mapping.fd, self._mapping.taken = fd.value, 0
        weakref.finalize(self._mapping, _release, address.value, nbytes, fd.value)
        _mapped[address.value] = self._mapping

    @classmethod
    def _wrap(cls, mapping: Any) -> "Memory":
        self = cls.__new__(cls)
        self._mapping = mapping
        return self

    @property
    def fd(self) -> int:
        return int(self._mapping.fd)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._mapping)

    @property
    def nbytes(self) -> int:
        return len(self._mapping)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Memory) and self._mapping is other._mapping

    def __hash__(self) -> int:
        return hash(self.address)

    def __repr__(self) -> str:
        return f"<kvpack.Memory of {self.nbytes} bytes, fd {self.fd}>"

    def array(self, shape: "Shape", dtype: "npt.DTypeLike" = "uint8", offset: int = 0) -> Any:
        """An array at a byte offset. New memory is zero."""
        kind = np.dtype(dtype)
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        count = int(np.prod(dims, dtype=np.int64))
        if count == 0 or offset < 0 or offset + count * kind.itemsize > self.nbytes:
            raise InvalidError(
                f"{count} x {kind.itemsize} bytes at {offset} do not fit {self.nbytes} bytes"
            )
        return np.frombuffer(self._mapping, kind, count, offset).reshape(dims)

    def take(self, shape: "Shape", dtype: "npt.DTypeLike" = "uint8") -> Any:
        """The next array behind those taken before, on a multiple of 256 bytes."""
        array = self.array(shape, dtype, self._mapping.taken)
        self._mapping.taken += -(-array.nbytes // ALIGN) * ALIGN
        return array

    def _c(self) -> _abi.kvp_mem:
        return _abi.kvp_mem(_abi.MEM_FD, self.fd, 0, 0)

    @staticmethod
    def of(array: Any) -> "Memory":
        """The memory that holds an array or a tensor on the CPU (or a view of one)."""
        lay = layout_of(array)
        for start, mapping in list(_mapped.items()):
            if start <= lay.address and lay.end <= start + len(mapping):
                return Memory._wrap(mapping)
        raise InvalidError(
            "the array is not in memory that a daemon can map: make it with kvpack.alloc() "
            "or kvpack.Memory"
        )


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a GPU: the storage of a torch tensor, which it keeps. The library exports it.

    Storages of the caching allocator can be exported as they are; those of expandable segments
    only if they were created shareable.
    """

    address: int
    nbytes: int
    storage: Any = field(compare=False, repr=False)

    @staticmethod
    def of(tensor: Any) -> "DeviceMemory":
        """The memory that holds a tensor on a CUDA device (or a view of one)."""
        storage = tensor.untyped_storage()
        return DeviceMemory(storage.data_ptr(), storage.nbytes(), storage)

    def _c(self) -> _abi.kvp_mem:
        return _abi.kvp_mem(_abi.MEM_DEVICE, -1, self.address, self.nbytes)


AnyMemory = Union[Memory, DeviceMemory]


def memory_of(array: Any) -> AnyMemory:
    """The memory that holds an array or tensor."""
    return DeviceMemory.of(array) if _device_of(array) == "cuda" else Memory.of(array)


def alloc(
    shape: "Shape", dtype: "npt.DTypeLike" = "uint8", name: str = "kvpack"
) -> Tuple[Any, Memory]:
    """A numpy array, zeroed, in memory of its own that pools can use; and that memory.

    >>> array, memory = alloc((4, 16, 576))
    >>> array.nbytes == memory.nbytes
    True
    """
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    memory = Memory(int(np.prod(dims, dtype=np.int64)) * np.dtype(dtype).itemsize, name)
    return memory.array(dims, dtype), memory


def alloc_tensor(shape: "Shape", dtype: Any, name: str = "kvpack") -> Tuple[Any, Memory]:
    """The same as a torch tensor on the CPU, of any torch dtype."""
    import torch

    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    count = int(np.prod(dims, dtype=np.int64))
    memory = Memory(count * torch.empty((), dtype=dtype).element_size(), name)
    return torch.frombuffer(memory._mapping, dtype=dtype).reshape(dims), memory


class Layout(NamedTuple):
    """Where an array's elements are; strides in bytes."""

    address: int
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    itemsize: int

    @property
    def end(self) -> int:
        """Address behind the last element."""
        steps = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides))
        return self.address + steps + self.itemsize


def _device_of(array: Any) -> Optional[str]:
    """The device type of a torch tensor; None for other arrays."""
    torch: Optional[Any] = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return None
    return str(array.device.type)


def layout_of(array: Any) -> Layout:
    """The layout of a numpy array or a torch tensor."""
    device = _device_of(array)
    if device is not None:
        if device not in ("cpu", "cuda"):
            raise UnsupportedError(f"a tensor on {array.device}: only cpu and cuda are known")
        size = array.element_size()
        strides = tuple(n * size for n in array.stride())
        return _checked(Layout(array.data_ptr(), tuple(array.shape), strides, size))
    interface: Dict[str, Any] = array.__array_interface__
    strides = interface["strides"] or np.asarray(array).strides
    lay = Layout(interface["data"][0], tuple(array.shape), tuple(strides), array.itemsize)
    return _checked(lay)


def _checked(lay: Layout) -> Layout:
    if 0 in lay.shape or any(stride < 0 for stride in lay.strides):
        raise InvalidError(f"an array of shape {lay.shape} with strides {lay.strides}")
    return lay
