# SPDX-License-Identifier: Apache-2.0
"""Caches on a GPU, and fences from its streams. Needs torch and a CUDA device."""

import kvpack
import numpy as np
import pytest
import rows
from pair import SECS, next_room
from rig import Rig, poll_until

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

CONFIG = "[gpu]\ndevices = all\nslots = 4\nslot_bytes = 256k\n"
LONG = 1_000_000_000  # cycles, about half a second
LAYERS, PAGES, PAGE, BYTES = 3, 40, 16, 576


@pytest.fixture(scope="module")
def nodes():
    """Two daemons that serve pools of the GPU."""
    with Rig() as rig:
        yield rig.daemon("p0", CONFIG), rig.daemon("d0", CONFIG)


@pytest.fixture
def fence(nodes):
    with kvpack.Client(nodes[0].socket) as client, client.fence(4) as fence:
        yield fence


# ---- fences --------------------------------------------------------------------------------------


def test_a_word_is_written_when_the_stream_gets_there(fence):
    stream = torch.cuda.Stream()
    point = fence.next(1)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
    fence.signal_on_stream(point, stream)
    assert fence.value(1) == 0
    stream.synchronize()
    assert [fence.value(word) for word in range(4)] == [0, 1, 0, 0]


def test_rows_are_there_before_the_word(fence):
    host, _ = kvpack.alloc_tensor((1 << 24,), torch.uint8)
    device = torch.empty_like(host, device="cuda")
    for value in range(1, 6):
        device.fill_(value)
        host.copy_(device, non_blocking=True)
        point = fence.next()
        fence.signal_on_stream(point)  # the current stream
        poll_until(lambda: fence.value() >= point.value)
        assert int(host.min()) == int(host.max()) == value


# ---- entries and pools ---------------------------------------------------------------------------


def test_entries_of_tensors_on_a_gpu():
    kv = torch.zeros((LAYERS, PAGES, PAGE, BYTES), dtype=torch.uint8, device="cuda")
    entries = [kvpack.Entry.rows(kv[layer], layer) for layer in range(LAYERS)]
    assert len({entry.memory for entry in entries}) == 1
    assert entries[2].offset == 2 * PAGES * PAGE * BYTES
    assert entries[2].memory.nbytes == kv.untyped_storage().nbytes()
    assert isinstance(entries[0].memory, kvpack.DeviceMemory)


def cache(device):
    """A cache, its memory kept by the tensor, and a numpy copy of it when asked."""
    if device == "cpu":
        return kvpack.alloc_tensor((LAYERS, PAGES, PAGE, BYTES), torch.uint8)[0]
    return torch.zeros((LAYERS, PAGES, PAGE, BYTES), dtype=torch.uint8, device=device)


# A daemon does not move between its own lanes: no GPU and host memory of one daemon.
WAYS = [
    ("cuda", "cuda", False),
    ("cuda", "cpu", False),
    ("cpu", "cuda", False),
    ("cuda", "cuda", True),
]


@pytest.mark.parametrize("source, target, same_node", WAYS)
def test_rows_move(nodes, source, target, same_node):
    here, there = nodes[0], nodes[0 if same_node else 1]
    room, end, dcp = next_room(), 333, 2
    with kvpack.Client(here.socket) as prefill, kvpack.Client(there.socket) as decode:
        kv, arrived = cache(source), cache(target)
        src = kvpack.Pool.from_arrays(prefill, list(kv), page_size=PAGE)
        dst = kvpack.Pool.from_arrays(decode, list(arrived), page_size=PAGE)
        src_side = kvpack.Side(PAGE, rows.some_pages(PAGES - 1, PAGES, room))
        pages = rows.some_pages(-(-end // (PAGE * dcp)), PAGES, room + 1)
        dst_side = kvpack.Side(PAGE, pages, dcp_size=dcp, dcp_rank=1)
        receive = decode.expect(
            kvpack.Expect(room, dst, [dst_side], [kvpack.Sender(prefill.node_address)], end=end)
        )
        send = prefill.open(kvpack.Open(room, src, [kvpack.Side(PAGE)]))
        fence = prefill.fence()
        computed = np.zeros(kv.shape, np.uint8)
        for start in range(0, end, 128):
            stop = min(start + 128, end)
            for layer in range(LAYERS):
                rows.put_rows(computed[layer], room, layer, src_side, start, stop)
            point = fence.next()
            chunk = kvpack.Side(PAGE, src_side.pages[start // PAGE :], pos0=start)
            send.submit(
                kvpack.Chunk(start, stop - start, [chunk], fence=point, last=stop == end)
            )
            kv.copy_(torch.from_numpy(computed), non_blocking=True)
            fence.signal_on_stream(point)
        receive.wait(SECS)
        expected = np.zeros(kv.shape, np.uint8)
        for layer in range(LAYERS):
            rows.put_rows(expected[layer], room, layer, dst_side, 0, end)
        assert (arrived.cpu().numpy() == expected).all()
        send.wait_source_free(3, SECS)
