# SPDX-License-Identifier: Apache-2.0
import errno
import gc
import importlib.util
import select
import socket
import threading

import kvpack
import pytest
from kvpack.errors import error_of_call
from pair import PAGE, SECS, End, Pair
from rig import poll_until


def test_no_daemon():
    with pytest.raises(kvpack.DaemonLostError, match="/nowhere"):
        kvpack.Client("/nowhere")


def test_what_a_dead_daemon_leaves(tmp_path):
    path = str(tmp_path / "sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(path)
    with pytest.raises(kvpack.DaemonLostError, match="refused"):
        kvpack.Client(path)


def test_a_socket_of_others():
    error = error_of_call(errno.EACCES, 0, "cannot connect to /run/kvpack/sock")
    assert isinstance(error, kvpack.DeniedError)
    assert isinstance(error, PermissionError)


def test_the_node(nodes):
    with kvpack.Client(nodes[0].socket, name="here") as client:
        assert client.node_name == "p0"
        assert client.node_address == nodes[0].address
        assert "here" in str(client.inspect("clients"))
        with pytest.raises(kvpack.KvpackError):
            client.inspect("nonsense")


def test_closed_clients_refuse(nodes):
    end = End(nodes[0], "closed")
    end.client.close()
    end.client.close()
    with pytest.raises(kvpack.InvalidError, match="closed"):
        end.client.process()
    with end.pool:
        pass  # nothing to unregister any more


def test_pools_unregister_at_the_end(nodes):
    array, _ = kvpack.alloc((4, PAGE, 32))
    with kvpack.Client(nodes[0].socket) as client:

        def labels():
            return [pool["label"] for pool in client.inspect("pools")["pools"]]

        with kvpack.Pool.from_arrays(client, [array], page_size=PAGE, label="short") as pool:
            assert "short" in labels()
        assert "short" not in labels()
        with pytest.raises(kvpack.NotFoundError):
            pool.unregister()


def test_refused_pools(nodes):
    array, _ = kvpack.alloc((4, PAGE, 32))
    with kvpack.Client(nodes[0].socket) as client:
        entry = kvpack.Entry.rows(array, 0)
        with pytest.raises(kvpack.InvalidError):
            client.register([])
        with pytest.raises(kvpack.KvpackError):
            client.register([entry, entry])  # they overlap
        with pytest.raises(kvpack.InvalidError):
            client.register([entry], tag=bytes(100))
        with pytest.raises(kvpack.InvalidError, match="neither"):
            kvpack.Pool.from_arrays(client, [array], page_size=3)


def test_rows_without_pages_are_split(nodes):
    array, _ = kvpack.alloc((4 * PAGE, 32))
    with kvpack.Client(nodes[0].socket) as client:
        pool = kvpack.Pool.from_arrays(client, {5: array}, page_size=PAGE)
        (entry,) = pool.entries
        assert (entry.layer, entry.n_pages, entry.rows_per_page) == (5, 4, PAGE)


def test_done_functions_run_in_process(nodes):
    with Pair(nodes) as pair:
        answers = []
        send = pair.prefill.client.open(
            kvpack.Open(pair.room, pair.prefill.pool, [kvpack.Side(PAGE)]), answers.append
        )
        for start in (0, 16, 32):
            send.submit(pair.chunk(start, start + 16), answers.append)
        assert answers == []  # pipelined
        poll_until(lambda: pair.prefill.client.process() and len(answers) == 4)
        assert answers == [None] * 4
        send.submit(pair.chunk(96, 100), answers.append)  # out of order
        poll_until(lambda: pair.prefill.client.process() and len(answers) == 5)
        assert isinstance(answers[4], kvpack.OrderError)


def test_what_a_done_function_raises_comes_out_of_process(nodes):
    with Pair(nodes) as pair:

        def done(error):
            raise RuntimeError("from done")

        pair.prefill.client.open(
            kvpack.Open(pair.room, pair.prefill.pool, [kvpack.Side(PAGE)]), done
        )
        with pytest.raises(RuntimeError, match="from done"):
            pair.prefill.client.wait(SECS)
        pair.prefill.client.process()


def test_a_refused_room_with_done_fails(nodes):
    with Pair(nodes) as pair:
        errors = []
        room = pair.decode.client.expect(pair.expectation(end=10**6), errors.append)
        poll_until(lambda: pair.decode.client.process() and errors)
        assert isinstance(errors[0], kvpack.DstRangeError)
        assert room.state.failed and room.state.released
        with pytest.raises(kvpack.DstRangeError):
            room.state.raise_if_failed()


def test_the_fd_tells_and_changed_names_the_room(nodes):
    with Pair(nodes) as pair:
        send = pair.open()
        list(pair.prefill.client.changed())
        poller = select.poll()
        poller.register(pair.prefill.client.fileno(), pair.prefill.client.events)
        receive = pair.expect()
        seen = []
        while send not in seen:
            assert poller.poll(SECS * 1000)
            pair.prefill.client.process()
            seen = list(pair.prefill.client.changed())
        poll_until(lambda: pair.prefill.client.process() or send.state.phase == kvpack.Phase.READY)
        assert pair.prefill.client.poll_timeout is None
        del receive


def test_clients_of_different_threads(nodes):
    failures = []

    def work():
        try:
            with Pair(nodes) as pair, pair.open() as send, pair.expect() as receive:
                pair.compute()
                send.submit(pair.chunk(0, 100))
                receive.wait(SECS)
                pair.check()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_fences_go_with_their_client(nodes):
    client = kvpack.Client(nodes[0].socket)
    fence = client.fence(2)
    with pytest.raises(kvpack.InvalidError, match="word is 2"):
        fence.next(2)
    client.close()
    with pytest.raises(kvpack.InvalidError, match="destroyed"):
        fence.signal(kvpack.FencePoint(fence, 0, 1))
    fence.destroy()


def test_stream_fences_say_what_is_missing(nodes):
    if importlib.util.find_spec("torch") and importlib.import_module("torch").cuda.is_available():
        pytest.skip("nothing is missing")
    with kvpack.Client(nodes[0].socket) as client, client.fence() as fence:
        with pytest.raises(kvpack.UnsupportedError, match="torch"):
            fence.signal_on_stream(fence.next())


def test_a_dropped_client_closes(nodes):
    client = kvpack.Client(nodes[0].socket, name="dropped")
    del client
    gc.collect()
    with kvpack.Client(nodes[0].socket) as other:
        poll_until(lambda: "dropped" not in str(other.inspect("clients")))


def test_a_restarted_daemon_is_found_again(rig):
    node, other = rig.daemon("p0"), rig.daemon("d0")
    with Pair((node, other)) as pair:
        send = pair.open()
        node.kill()
        node.start()
        pair.prefill.client.wait(SECS)
        # Nothing was submitted: the room was repeated, at the new daemon, with the same pool.
        receive = pair.expect(senders=[kvpack.Sender(node.address)])
        send.wait_ready(SECS)
        pair.compute()
        send.submit(pair.chunk(0, 64))
        send.wait_delivered(1, SECS)
        node.kill()
        with pytest.raises(kvpack.DaemonLostError):
            send.wait(SECS)
        assert send.wait_released(SECS).retry
        with pytest.raises((kvpack.PeerLostError, kvpack.TransportError)):
            receive.wait(SECS)
        node.start()


def test_without_reconnect(rig):
    node = rig.daemon("p0")
    with kvpack.Client(node.socket, reconnect=False, timeout=0.2) as client:
        node.kill()
        poll_until(lambda: client.process() or True)
        with pytest.raises(kvpack.DaemonLostError):
            for _ in range(50):
                client.inspect("status")
    node.start()
