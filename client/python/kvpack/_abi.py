# SPDX-License-Identifier: Apache-2.0
"""The C interface: structs, prototypes, and finding the library. See kvpack.h for what they mean.

The structs have the names and fields of the header; a test compares every offset with it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_int32,
    c_size_t,
    c_short,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Dict, List, Tuple

SONAME = "libkvpack.so.1"

KEY_BYTES = 16
MAX_META = 65536

MEM_FD, MEM_DEVICE = 0, 1
WAIT_READY, WAIT_TERMINAL, WAIT_RELEASED = 1, 2, 4

DoneFn = CFUNCTYPE(None, c_void_p, c_int, c_char_p)


class kvp_client_options(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("socket", c_char_p),
        ("name", c_char_p),
        ("timeout_ms", c_uint32),
        ("no_reconnect", c_uint32),
        ("observer", c_uint32),
    ]


class kvp_entry_desc(Structure):
    _fields_ = [
        ("layer", c_uint32),
        ("klass", c_uint32),
        ("group", c_uint32),
        ("mem", c_uint32),
        ("offset", c_uint64),
        ("bytes", c_uint64),
        ("page_stride", c_uint64),
        ("row_stride", c_uint64),
        ("row_bytes", c_uint32),
        ("lo", c_uint32),
        ("full_bytes", c_uint32),
        ("rows_per_page", c_uint32),
        ("n_pages", c_uint32),
    ]


class kvp_mem(Structure):
    _fields_ = [
        ("kind", c_uint32),
        ("fd", c_int32),
        ("addr", c_uint64),
        ("bytes", c_uint64),
    ]


class kvp_pool_desc(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("entries", POINTER(kvp_entry_desc)),
        ("n_entries", c_uint32),
        ("fds", POINTER(c_int)),
        ("n_fds", c_uint32),
        ("layout_tag", c_char_p),
        ("tag_bytes", c_uint32),
        ("label", c_char_p),
        ("mems", POINTER(kvp_mem)),
        ("n_mems", c_uint32),
    ]


class kvp_side_desc(Structure):
    _fields_ = [
        ("group", c_uint32),
        ("page", c_uint32),
        ("dcp_size", c_uint32),
        ("dcp_rank", c_uint32),
        ("interleave", c_uint32),
        ("n_pages", c_uint32),
        ("pages", c_void_p),
        ("pos0", c_uint64),
        ("first", c_uint64),
    ]


class kvp_timers(Structure):
    _fields_ = [
        ("offer_ms", c_uint32),
        ("open_ms", c_uint32),
        ("progress_ms", c_uint32),
        ("fence_ms", c_uint32),
        ("lease_ms", c_uint32),
    ]


class kvp_expect_sender(Structure):
    _fields_ = [
        ("address", c_char_p),
        ("sender", c_uint32),
        ("n_dests", c_uint32),
        ("role", c_uint32),
    ]


class kvp_segment(Structure):
    _fields_ = [
        ("id", c_uint32),
        ("entry", c_uint32),
        ("offset", c_uint64),
        ("bytes", c_uint64),
    ]


class kvp_expect(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("room", c_uint64),
        ("key", c_char_p),
        ("dest", c_uint32),
        ("pool", c_uint32),
        ("sides", POINTER(kvp_side_desc)),
        ("segments", POINTER(kvp_segment)),
        ("senders", POINTER(kvp_expect_sender)),
        ("n_sides", c_uint32),
        ("n_segments", c_uint32),
        ("n_senders", c_uint32),
        ("meta_from", c_int32),
        ("prefix", c_uint64),
        ("end", c_uint64),
        ("label", c_char_p),
        ("timers", kvp_timers),
    ]


class kvp_open(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("room", c_uint64),
        ("key", c_char_p),
        ("sender", c_uint32),
        ("pool", c_uint32),
        ("sides", POINTER(kvp_side_desc)),
        ("n_sides", c_uint32),
        ("mask_bytes", c_uint32),
        ("entry_mask", c_char_p),
        ("label", c_char_p),
        ("timers", kvp_timers),
    ]


class kvp_chunk(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("start", c_uint64),
        ("tokens", c_uint64),
        ("sides", POINTER(kvp_side_desc)),
        ("n_sides", c_uint32),
        ("set_bytes", c_uint32),
        ("entry_set", c_char_p),
        ("fence", c_void_p),
        ("fence_word", c_uint32),
        ("last", c_uint32),
        ("fence_value", c_uint64),
        ("segments", POINTER(kvp_segment)),
        ("n_segments", c_uint32),
        ("meta_bytes", c_uint32),
        ("meta", c_char_p),
    ]


class kvp_room_state(Structure):
    _fields_ = [
        ("size", c_size_t),
        ("phase", c_uint32),
        ("complete", c_uint32),
        ("failed", c_uint32),
        ("released", c_uint32),
        ("source_free", c_uint32),
        ("delivered", c_uint32),
        ("arrived", c_uint64),
        ("prefix", c_uint64),
        ("end", c_uint64),
        ("status", c_int),
        ("retry", c_uint32),
        ("reason", c_char_p),
        ("meta", c_void_p),
        ("meta_bytes", c_uint32),
    ]


_Client = c_void_p
_Fence = c_void_p
_Done = (DoneFn, c_void_p)

# Results and arguments of every function of the header.
PROTOTYPES: Dict[str, Tuple[object, List[object]]] = {
    "kvp_status_name": (c_char_p, [c_int]),
    "kvp_client_open": (c_int, [POINTER(_Client), POINTER(kvp_client_options)]),
    "kvp_client_close": (None, [_Client]),
    "kvp_last_error": (c_char_p, [_Client]),
    "kvp_last_status": (c_int, [_Client]),
    "kvp_node_name": (c_char_p, [_Client]),
    "kvp_node_address": (c_char_p, [_Client]),
    "kvp_client_fd": (c_int, [_Client]),
    "kvp_client_events": (c_short, [_Client]),
    "kvp_client_timeout": (c_int, [_Client]),
    "kvp_process": (c_int, [_Client]),
    "kvp_wait": (c_int, [_Client, c_int]),
    "kvp_memory_create": (c_int, [c_char_p, c_uint64, POINTER(c_int), POINTER(c_void_p)]),
    "kvp_pool_register": (c_int, [_Client, POINTER(kvp_pool_desc), POINTER(c_uint32)]),
    "kvp_pool_pause": (c_int, [_Client, c_uint32, *_Done]),
    "kvp_pool_resume": (c_int, [_Client, c_uint32, POINTER(c_int), c_uint32]),
    "kvp_pool_resume_mems": (c_int, [_Client, c_uint32, POINTER(kvp_mem), c_uint32]),
    "kvp_pool_unregister": (c_int, [_Client, c_uint32, *_Done]),
    "kvp_fence_create": (c_int, [_Client, c_uint32, POINTER(_Fence)]),
    "kvp_fence_destroy": (None, [_Fence]),
    "kvp_fence_signal": (None, [_Fence, c_uint32, c_uint64]),
    "kvp_fence_words": (c_void_p, [_Fence]),
    "kvp_fence_map_device": (c_int, [_Fence]),
    "kvp_fence_stream_signal": (c_int, [_Fence, c_uint32, c_uint64, c_void_p]),
    "kvp_fence_device_words": (c_uint64, [_Fence]),
    "kvp_expect": (c_int, [_Client, POINTER(kvp_expect), *_Done, POINTER(c_uint64)]),
    "kvp_open": (c_int, [_Client, POINTER(kvp_open), *_Done, POINTER(c_uint64)]),
    "kvp_submit": (c_int, [_Client, c_uint64, POINTER(kvp_chunk), *_Done, POINTER(c_uint32)]),
    "kvp_recall": (c_int, [_Client, c_uint64, c_uint32, POINTER(c_uint32)]),
    "kvp_abort": (c_int, [_Client, c_uint64, c_char_p]),
    "kvp_renew": (c_int, [_Client, c_char_p, c_uint64, c_char_p, c_uint32, c_uint32, *_Done]),
    "kvp_decline": (c_int, [_Client, c_char_p, c_uint64, c_char_p, c_uint32, c_char_p, *_Done]),
    "kvp_room_state": (c_int, [_Client, c_uint64, POINTER(kvp_room_state)]),
    "kvp_room_wait": (c_int, [_Client, c_uint64, c_int, c_int]),
    "kvp_room_wait_source_free": (c_int, [_Client, c_uint64, c_uint32, c_int]),
    "kvp_room_wait_delivered": (c_int, [_Client, c_uint64, c_uint32, c_int]),
    "kvp_room_next_changed": (c_uint64, [_Client]),
    "kvp_room_forget": (None, [_Client, c_uint64]),
    "kvp_drain": (c_int, [_Client, c_uint32, c_char_p]),
    "kvp_inspect": (c_int, [_Client, c_char_p, c_char_p, POINTER(c_void_p)]),
}


@functools.lru_cache(maxsize=None)
def lib() -> ctypes.CDLL:
    """The library: the file that $KVPACK_LIBRARY names, else libkvpack.so.1 where the system looks.

    Calls release the interpreter lock, so other threads run while one waits.
    """
    path = os.environ.get("KVPACK_LIBRARY") or SONAME
    try:
        handle = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"cannot load {path}: {error}. Install kvpack (and run ldconfig), or name the library "
            "in KVPACK_LIBRARY."
        ) from None
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(handle, name)
        function.restype = result
        function.argtypes = arguments
    return handle


@functools.lru_cache(maxsize=None)
def libc() -> ctypes.CDLL:
    handle = ctypes.CDLL(None)
    handle.free.restype, handle.free.argtypes = None, [c_void_p]
    handle.munmap.restype, handle.munmap.argtypes = c_int, [c_void_p, c_size_t]
    return handle
