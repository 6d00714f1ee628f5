# SPDX-License-Identifier: Apache-2.0
import gc
import os

import kvpack
import numpy as np
import pytest


def test_alloc_is_zero_and_shared_by_fd():
    array, memory = kvpack.alloc((4, 16, 72), "float32")
    assert array.shape == (4, 16, 72) and array.dtype == np.float32 and not array.any()
    array[1, 2, 3] = 7
    at = (16 * 72 + 2 * 72 + 3) * 4
    assert np.frombuffer(os.pread(memory.fd, 4, at), "float32") == 7


def test_memory_goes_with_its_last_view():
    array, memory = kvpack.alloc((8, 16))
    fd, view = memory.fd, array[2:4]
    del array, memory
    gc.collect()
    os.fstat(fd)
    assert kvpack.Memory.of(view).fd == fd
    del view
    with pytest.raises(OSError):
        os.fstat(fd)


def test_memory_of_finds_the_right_one():
    first, one = kvpack.alloc(100)
    second, two = kvpack.alloc(100)
    assert kvpack.Memory.of(first) == one != two == kvpack.Memory.of(second[3:50])
    with pytest.raises(kvpack.InvalidError, match="kvpack.alloc"):
        kvpack.Memory.of(np.zeros(10))


def test_take_aligns_and_refuses_what_does_not_fit():
    memory = kvpack.Memory(1000)
    assert memory.take(10).ctypes.data == memory.address
    assert memory.take(10, "int64").ctypes.data == memory.address + 256
    with pytest.raises(kvpack.InvalidError, match="do not fit"):
        memory.take(1000)
    with pytest.raises(kvpack.InvalidError):
        memory.array(1000, offset=1)


def test_entries_have_the_strides_of_the_array():
    kv, _ = kvpack.alloc((8, 2, 16, 64), "float16")  # K and V side by side in a page
    key = kvpack.Entry.rows(kv[:, 0], layer=3, full_bytes=256)
    value = kvpack.Entry.rows(kv[:, 1], layer=3, lo=128, full_bytes=256)
    assert (key.page_stride, key.row_stride, key.row_bytes) == (4096, 128, 128)
    assert (key.rows_per_page, key.n_pages, key.offset) == (16, 8, 0)
    assert (value.offset, value.lo, value.full_bytes) == (2048, 128, 256)
    assert value.offset + value.bytes == kv.nbytes and key.bytes == kv.nbytes - 2048


def test_entries_of_one_head_of_a_head_major_page():
    pages, _ = kvpack.alloc((4, 2, 16, 128))  # [page][head][slot]
    head = kvpack.Entry.rows(pages[:, 1], layer=0, lo=128, full_bytes=256)
    assert (head.page_stride, head.row_stride, head.offset) == (4096, 128, 2048)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[:, :, ::2],  # holes in a row
        lambda a: a[::-1],  # backwards
        lambda a: a[:0],  # nothing
        lambda a: a[0, 0],  # no pages
    ],
)
def test_arrays_that_are_no_rows(view):
    array, _ = kvpack.alloc((4, 16, 72))
    with pytest.raises(kvpack.InvalidError):
        kvpack.Entry.rows(view(array), 0)


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    tensor, memory = kvpack.alloc_tensor((4, 16, 72), torch.bfloat16)
    assert tensor.shape == (4, 16, 72) and tensor.dtype == torch.bfloat16
    assert kvpack.Memory.of(tensor[1:]) == memory
    entry = kvpack.Entry.rows(tensor, 0)
    assert (entry.page_stride, entry.row_stride, entry.row_bytes) == (16 * 144, 144, 144)
    with pytest.raises(kvpack.InvalidError, match="kvpack.alloc"):
        kvpack.Entry.rows(torch.zeros(4, 16, 72), 0)


def test_tensors_elsewhere_are_refused_in_words():
    torch = pytest.importorskip("torch")
    with pytest.raises(kvpack.UnsupportedError, match="on meta: only cpu and cuda"):
        kvpack.Entry.rows(torch.zeros(4, 16, 72, device="meta"), 0)
