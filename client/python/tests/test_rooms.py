# SPDX-License-Identifier: Apache-2.0
import time

import kvpack
import pytest
from kvpack import Phase
from pair import PAGE, SECS, Pair


@pytest.mark.parametrize(
    "side",
    [
        dict(),
        dict(dcp_size=4, dcp_rank=1),
        dict(dcp_size=2, dcp_rank=1, interleave=PAGE),
    ],
)
def test_a_room_from_begin_to_end(nodes, side):
    with Pair(nodes, end=151, **side) as pair, pair.open() as send, pair.expect() as receive:
        ready = send.wait_ready(SECS)
        assert (ready.prefix, ready.end) == (0, 151)
        pair.compute()
        assert send.submit(pair.chunk(0, 64)) == 0
        assert send.submit(pair.chunk(64, 151)) == 1
        assert receive.wait(SECS).arrived == 151
        pair.check()
        assert receive.wait_released(SECS).phase == Phase.RELEASED
        assert send.wait_source_free(2, SECS).source_free == 2
        assert send.wait_delivered(2, SECS).delivered == 2
        assert send.wait(SECS).complete and not send.state.failed


def test_a_cached_prefix_is_not_sent(nodes):
    with Pair(nodes, end=100, prefix=64) as pair, pair.expect() as receive, pair.open() as send:
        assert send.wait_ready(SECS).prefix == 64
        pair.compute()
        send.submit(pair.chunk(64, 100))
        receive.wait(SECS)
        pair.check()


def test_state_and_meta_come_with_complete(nodes):
    with Pair(nodes) as pair:
        there = kvpack.Segment(7, pair.decode.blob, 1000, 1000)
        here = kvpack.Segment(7, pair.prefill.blob, 3000, 1000)
        pair.prefill.state[3] = 171
        pair.compute()
        send = pair.open()
        receive = pair.expect(segments=[there], meta_from=0)
        send.submit(pair.chunk(0, 100, segments=[here], meta=b"first token: 42"))
        assert receive.wait(SECS).meta == b"first token: 42"
        assert (pair.decode.state[1] == 171).all() and not pair.decode.state[[0, 2, 3]].any()
        pair.check()


def test_a_fence_holds_the_rows_back(nodes):
    with Pair(nodes) as pair, pair.prefill.client.fence(3) as fence:
        send, receive = pair.open(), pair.expect()
        point = fence.next(2)
        assert point == (fence, 2, 1) and fence.value(2) == 0
        send.submit(pair.chunk(0, 100, fence=point))
        with pytest.raises(kvpack.WaitTimeout):
            receive.wait(0.3)
        pair.compute()
        fence.signal(point)
        assert fence.value(2) == 1
        receive.wait(SECS)
        pair.check()


def test_entries_can_be_sent_one_by_one(nodes):
    with Pair(nodes) as pair:
        send, receive = pair.open(), pair.expect()
        pair.compute()
        for entry in range(3):
            send.submit(pair.chunk(0, 100, entries=[entry], last=False))
        send.submit(pair.chunk(100, 100))
        receive.wait(SECS)
        pair.check()


def test_recall_gives_the_number_back(nodes):
    with Pair(nodes) as pair:
        send = pair.open()
        send.submit(pair.chunk(0, 64))
        assert send.submit(pair.chunk(64, 100)) == 1
        assert send.recall(1) == 1
        assert send.submit(pair.chunk(64, 100)) == 1
        pair.compute()
        receive = pair.expect()
        receive.wait(SECS)
        pair.check()


def test_abort_shows_at_both_ends(nodes):
    with Pair(nodes) as pair:
        send, receive = pair.open(), pair.expect()
        send.wait_ready(SECS)
        receive.abort("the user left")
        with pytest.raises(kvpack.AbortedError, match="the user left") as caught:
            send.wait(SECS)
        assert caught.value.status == kvpack.Status.ABORTED
        with pytest.raises(kvpack.AbortedError):
            receive.wait(SECS)
        state = receive.wait_released(SECS)
        assert state.failed and state.released and not state.complete
        send.wait_released(SECS)
        with pytest.raises(kvpack.AbortedError):
            send.submit(pair.chunk(0, 100))


def test_forgetting_a_live_room_aborts_it(nodes):
    with Pair(nodes) as pair:
        send = pair.open()
        with pair.expect() as receive:
            send.wait_ready(SECS)
        with pytest.raises(kvpack.NotFoundError):
            receive.state
        with pytest.raises(kvpack.AbortedError):
            send.wait(SECS)


def test_a_timer_of_the_room(nodes):
    with Pair(nodes) as pair:
        send = pair.open(timers=kvpack.Timers(open_ms=100))
        with pytest.raises(kvpack.TimeoutError, match="within 0.1 s") as caught:
            send.wait(SECS)
        assert not isinstance(caught.value, kvpack.WaitTimeout)


def test_a_wait_of_its_own_time(nodes):
    with Pair(nodes) as pair:
        send = pair.open()
        start = time.monotonic()
        with pytest.raises(kvpack.WaitTimeout) as caught:
            send.wait_ready(0.25)
        assert 0.2 < time.monotonic() - start < 2
        assert isinstance(caught.value, TimeoutError)
        assert not send.state.terminal


def test_lease_renew_decline(nodes):
    with Pair(nodes) as pair:
        key, address = bytes(range(16)), pair.prefill.client.node_address
        send = pair.open(key=key, timers=kvpack.Timers(lease_ms=1000))
        for _ in range(4):
            pair.decode.client.renew(address, pair.room, key=key, lease_ms=1000)
            time.sleep(0.35)
        assert not send.state.failed
        pair.decode.client.decline(address, pair.room, key=key, reason="no blocks")
        with pytest.raises(kvpack.DeclinedError, match="no blocks"):
            send.wait(SECS)
        send.wait_released(SECS)  # then the room's number is free
        again = pair.open(key=key, timers=kvpack.Timers(lease_ms=100))
        with pytest.raises(kvpack.LeaseError):
            again.wait(SECS)


# ---- refusals: each its own class ----------------------------------------------------------------


def test_refused_expectations(nodes):
    with Pair(nodes) as pair:
        page = pair.dst_side.pages
        cases = [
            (kvpack.AlignmentError, dict(prefix=8)),
            (kvpack.InvalidError, dict(dest=64)),
            (kvpack.DstRangeError, dict(sides=[kvpack.Side(PAGE, page[:3])])),
            (kvpack.PageHeldError, dict(sides=[kvpack.Side(PAGE, [page[0]] * len(page))])),
            (kvpack.GeometryError, dict(sides=[kvpack.Side(PAGE, page, interleave=7)])),
            (kvpack.InvalidError, dict(key=b"short")),
        ]
        for expected, fields in cases:
            with pytest.raises(expected) as caught:
                pair.expect(**fields)
            assert str(caught.value), expected
        pair.expect()
        with pytest.raises((kvpack.ExistsError, kvpack.PageHeldError)):
            pair.expect()


def test_refused_chunks(nodes):
    with Pair(nodes) as pair:
        send, receive = pair.open(), pair.expect()
        send.wait_ready(SECS)
        with pytest.raises(kvpack.OrderError):
            send.submit(pair.chunk(16, 100))
        with pytest.raises(kvpack.SrcRangeError):
            send.submit(pair.chunk(0, 100, sides=[kvpack.Side(PAGE, [1])]))
        with pytest.raises(kvpack.InvalidError):
            send.submit(pair.chunk(0, 100, meta=bytes(70000)))
        with pytest.raises(kvpack.NotFoundError):
            receive.submit(pair.chunk(0, 100))
        pair.compute()
        assert send.submit(pair.chunk(0, 100)) == 0  # the room lives
        receive.wait(SECS)
        pair.check()


def test_tags_that_differ(nodes):
    with Pair(nodes) as pair:
        other = pair.decode.client.register(pair.decode.pool.entries, tag=b"another model")
        pair.open()
        receive = pair.expect(pool=other)
        with pytest.raises(kvpack.MismatchError):
            receive.wait(SECS)


def test_pause_and_resume(nodes):
    with Pair(nodes) as pair:
        send, receive = pair.open(), pair.expect()
        send.wait_ready(SECS)
        pair.decode.pool.pause()
        with pytest.raises(kvpack.PoolGoneError):
            receive.wait(SECS)
        with pytest.raises(kvpack.KvpackError):
            pair.expect()
        pair.decode.pool.resume()
        send.wait_released(SECS)
        send, receive = pair.open(), pair.expect()
        pair.compute()
        send.submit(pair.chunk(0, 100))
        receive.wait(SECS)
        pair.check()
