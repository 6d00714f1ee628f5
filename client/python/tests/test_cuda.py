# SPDX-License-Identifier: Apache-2.0
"""Words that a CUDA stream writes. Needs torch and a CUDA device, but no daemon."""

import time

import kvpack
import pytest
from kvpack.cuda import StreamWriter

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

LONG = 1_000_000_000  # cycles, about half a second


@pytest.fixture
def words():
    memory = kvpack.Memory(4096)
    writer = StreamWriter(memory.address, 64)
    yield memory.array(8, "uint64"), writer
    writer.close()


def test_a_word_is_written_when_the_stream_gets_there(words):
    array, writer = words
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
    writer.write(8, 5, stream)
    assert array[1] == 0
    stream.synchronize()
    assert array.tolist() == [0, 5, 0, 0, 0, 0, 0, 0]


def test_rows_are_there_before_the_word(words):
    array, writer = words
    rows, _ = kvpack.alloc_tensor((1 << 24,), torch.uint8)
    device = torch.full_like(rows, 9, device="cuda")
    for value in range(1, 6):
        device.fill_(value)
        rows.copy_(device, non_blocking=True)
        writer.write(0, value, None)  # the current stream
        until = time.monotonic() + 10
        while array[0] < value:
            assert time.monotonic() < until
        assert int(rows.min()) == int(rows.max()) == value


def test_large_values(words):
    array, writer = words
    writer.write(56, 2**63 + 1, None)
    torch.cuda.synchronize()
    assert array[7] == 2**63 + 1
