# SPDX-License-Identifier: Apache-2.0
import asyncio

import kvpack
import pytest
from pair import SECS, Pair


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 3 * SECS))


async def served(nodes):
    async with kvpack.AsyncClient(nodes[0].socket) as p, kvpack.AsyncClient(nodes[1].socket) as d:
        pair = Pair(nodes)
        with pair:
            pair.prefill.client, pair.decode.client = p.client, d.client
            pair.prefill.pool = p.client.register(pair.prefill.pool.entries)
            pair.decode.pool = d.client.register(pair.decode.pool.entries)

            async def prefill():
                room = await p.open(
                    kvpack.Open(pair.room, pair.prefill.pool, [kvpack.Side(16)])
                )
                ready = await p.ready(room)
                pair.compute()
                assert await p.submit(room, pair.chunk(0, 48)) == 0
                assert await p.submit(room, pair.chunk(48, ready.end)) == 1
                await p.source_free(room, 2)
                await p.delivered(room, 2)
                return (await p.complete(room)).complete

            async def decode():
                room = await d.expect(pair.expectation())
                await d.arrived(room, 48)
                await d.complete(room)
                return (await d.released(room)).released

            assert await asyncio.gather(prefill(), decode()) == [True, True]
            pair.check()


def test_both_ends_in_one_loop(nodes):
    run(served(nodes))


async def failing(nodes):
    async with kvpack.AsyncClient(nodes[0].socket) as client:
        with Pair(nodes) as pair:
            pool = client.client.register(pair.prefill.pool.entries)
            room = await client.open(kvpack.Open(pair.room, pool, [kvpack.Side(16)]))
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.ready(room), 0.1)
            waiting = asyncio.ensure_future(client.ready(room))
            await asyncio.sleep(0)
            room.abort("enough")
            with pytest.raises(kvpack.AbortedError, match="enough"):
                await waiting
            assert (await client.released(room)).failed
            with pytest.raises(kvpack.OrderError):
                other = await client.open(kvpack.Open(pair.room + 10**6, pool, [kvpack.Side(16)]))
                await client.submit(other, pair.chunk(0, 16))
                await client.submit(other, pair.chunk(32, 48))


def test_errors_come_out_of_await(nodes):
    run(failing(nodes))


async def closing(nodes):
    with Pair(nodes) as pair:
        async with kvpack.AsyncClient(nodes[0].socket) as client:
            pool = client.client.register(pair.prefill.pool.entries)
            room = await client.open(kvpack.Open(pair.room, pool, [kvpack.Side(16)]))
            waiting = asyncio.ensure_future(client.ready(room))
            await asyncio.sleep(0.05)
        with pytest.raises(kvpack.CancelledError):
            await waiting


def test_closing_ends_the_waits(nodes):
    run(closing(nodes))
