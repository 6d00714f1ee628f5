# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode client in this process, with a pool each, for short tests."""

from __future__ import annotations

import itertools
from typing import Any, Dict, List, Sequence

import kvpack
import rows
from rig import Daemon

PAGE, PAGES, BYTES, LAYERS = 16, 24, 64, 2
SECS = 20

_rooms = itertools.count(1000)


def next_room() -> int:
    return next(_rooms)


class End:
    """A client with a pool of a few layers, a draft layer, and a blob."""

    def __init__(self, node: Daemon, name: str, width: int = PAGE) -> None:
        self.client = kvpack.Client(node.socket, name=name)
        self.kv, _ = kvpack.alloc((LAYERS, PAGES, PAGE, BYTES))
        self.draft, _ = kvpack.alloc((PAGES, width, BYTES // 2))
        self.state, _ = kvpack.alloc((4, 1000))
        self.pool = kvpack.Pool.from_arrays(
            self.client,
            list(self.kv),
            page_size=PAGE,
            replicated={LAYERS: self.draft},
            blobs={100: self.state},
            tag=b"test",
            label=name,
        )
        self.blob = LAYERS + 1  # number of its entry

    def put(self, key: int, side: kvpack.Side, start: int, end: int, kv: Any = None) -> None:
        kv = self.kv if kv is None else kv
        for layer in range(LAYERS):
            rows.put_rows(kv[layer], key, layer, side, start, end)
        rows.put_rows(self.draft, key, LAYERS, rows.replicated(side), start, end)

    def check(self, key: int, side: kvpack.Side, start: int, end: int) -> None:
        """All rows are there, and nothing else was written."""
        expected = self.kv * 0
        for layer in range(LAYERS):
            rows.put_rows(expected[layer], key, layer, side, start, end)
        assert (self.kv == expected).all()
        draft = self.draft * 0
        rows.put_rows(draft, key, LAYERS, rows.replicated(side), start, end)
        assert (self.draft == draft).all()


class Pair:
    """Prefill without DCP, decode as one rank; `end` tokens of a new room."""

    def __init__(
        self, nodes: Sequence[Daemon], end: int = 100, prefix: int = 0, **side: Any
    ) -> None:
        self.room, self.end, self.prefix = next_room(), end, prefix
        self.nodes = nodes
        self.src_side = kvpack.Side(PAGE, rows.some_pages(PAGES - 1, PAGES, self.room))
        size = side.get("dcp_size", 1)
        count = -(-end // (PAGE * size)) - prefix // (PAGE * size)
        pages = rows.some_pages(count, PAGES, self.room + 1)
        self.dst_side = kvpack.Side(PAGE, pages, pos0=prefix, **side)
        self.prefill = End(nodes[0], "prefill")
        self.decode = End(nodes[1], "decode", PAGE * size)

    def open(self, **fields: Any) -> kvpack.Room:
        values: Dict[str, Any] = dict(
            room=self.room, pool=self.prefill.pool, sides=[kvpack.Side(PAGE)], **fields
        )
        return self.prefill.client.open(kvpack.Open(**values))

    def expect(self, **fields: Any) -> kvpack.Room:
        return self.decode.client.expect(self.expectation(**fields))

    def expectation(self, **fields: Any) -> kvpack.Expect:
        values: Dict[str, Any] = dict(
            room=self.room,
            pool=self.decode.pool,
            sides=[self.dst_side],
            senders=[kvpack.Sender(self.prefill.client.node_address)],
            prefix=self.prefix,
            end=self.end,
        )
        values.update(fields)
        return kvpack.Expect(**values)

    def chunk(self, start: int, end: int, **fields: Any) -> kvpack.Chunk:
        pages: List[int] = list(self.src_side.pages)[start // PAGE : -(-end // PAGE)]
        values: Dict[str, Any] = dict(
            sides=[kvpack.Side(PAGE, pages, pos0=start // PAGE * PAGE)], last=end == self.end
        )
        values.update(fields)
        return kvpack.Chunk(start, end - start, **values)

    def compute(self, start: int = 0) -> None:
        self.prefill.put(self.room, self.src_side, start, self.end)

    def check(self) -> None:
        self.decode.check(self.room, self.dst_side, self.prefix, self.end)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *error: Any) -> None:
        self.prefill.client.close()
        self.decode.client.close()
