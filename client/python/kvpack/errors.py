# SPDX-License-Identifier: Apache-2.0
"""Statuses and the exceptions that stand for them: one class for each status."""

from __future__ import annotations

import builtins
import enum
import errno
import os
from typing import ClassVar, Dict, Type


class Status(enum.IntEnum):
    """Why a request was refused or a room failed; the numbers of ``enum kvp_status``."""

    OK = 0
    INVALID = 1
    VERSION = 2
    LIMIT = 3
    NOT_FOUND = 4
    EXISTS = 5
    PAGE_HELD = 6
    DENIED = 7
    GEOMETRY = 8
    ALIGNMENT = 9
    SRC_RANGE = 10
    DST_RANGE = 11
    MISMATCH = 12
    ORDER = 13
    COVERAGE = 14
    TIMEOUT = 15
    ABORTED = 16
    PEER_LOST = 17
    CLIENT_LOST = 18
    DAEMON_LOST = 19
    DECLINED = 20
    LEASE = 21
    FENCE_TIMEOUT = 22
    LANE_STUCK = 23
    STOPPING = 24
    NO_MEMORY = 25
    SYSTEM = 26
    UNREACHABLE = 27
    PROTOCOL = 28
    POOL_GONE = 29
    TRANSPORT = 30
    UNSUPPORTED = 31
    CORRUPT = 32


class KvpackError(Exception):
    """Base of all errors of this package.

    ``status`` names the cause, the text says field, value, and limit. ``retry`` is set when the
    same request may succeed later.
    """

    status: ClassVar[Status] = Status.OK
    retry: bool

    def __init__(self, text: str, *, retry: bool = False) -> None:
        super().__init__(text)
        self.retry = retry


class InvalidError(KvpackError, ValueError):
    """A malformed request."""

    status = Status.INVALID


class VersionError(KvpackError):
    """The daemon speaks no version that the library speaks."""

    status = Status.VERSION


class LimitError(KvpackError):
    """A maximum of the daemon is reached."""

    status = Status.LIMIT


class NotFoundError(KvpackError, LookupError):
    """An unknown pool, room, or fence."""

    status = Status.NOT_FOUND


class ExistsError(KvpackError):
    """This end of the room exists already."""

    status = Status.EXISTS


class PageHeldError(KvpackError):
    """A page is in an expectation that has not been released, or twice in the list."""

    status = Status.PAGE_HELD


class DeniedError(KvpackError, PermissionError):
    """Policy, or a wrong key."""

    status = Status.DENIED


class GeometryError(KvpackError, ValueError):
    """Pages, ranks, or interleave that do not fit together."""

    status = Status.GEOMETRY


class AlignmentError(KvpackError, ValueError):
    """A position that has to be a multiple of the virtual page is none."""

    status = Status.ALIGNMENT


class SrcRangeError(KvpackError, ValueError):
    """The source's page list does not cover the tokens."""

    status = Status.SRC_RANGE


class DstRangeError(KvpackError, ValueError):
    """The destination's page list does not cover the tokens."""

    status = Status.DST_RANGE


class MismatchError(KvpackError):
    """The two ends do not fit: tags, widths, page geometry."""

    status = Status.MISMATCH


class OrderError(KvpackError):
    """Chunks out of order, past the end, or after the last."""

    status = Status.ORDER


class CoverageError(KvpackError):
    """The senders together do not send each byte exactly once."""

    status = Status.COVERAGE


class TimeoutError(KvpackError, builtins.TimeoutError):
    """A timer of the room ran out; the text names it."""

    status = Status.TIMEOUT


class WaitTimeout(TimeoutError):
    """A wait of this process ran out of its time; the room lives on."""


class AbortedError(KvpackError):
    """An end wanted it."""

    status = Status.ABORTED


class PeerLostError(KvpackError, ConnectionError):
    """The other daemon is gone or silent."""

    status = Status.PEER_LOST


class ClientLostError(KvpackError, ConnectionError):
    """The engine process at the other end is gone."""

    status = Status.CLIENT_LOST


class DaemonLostError(KvpackError, ConnectionError):
    """The connection to this node's daemon is gone."""

    status = Status.DAEMON_LOST


class DeclinedError(KvpackError):
    """Decode said that it will not come."""

    status = Status.DECLINED


class LeaseError(KvpackError):
    """Decode neither came nor renewed in time."""

    status = Status.LEASE


class FenceTimeoutError(KvpackError):
    """The producer did not reach its fence."""

    status = Status.FENCE_TIMEOUT


class LaneStuckError(KvpackError):
    """The daemon's thread for this memory does not move."""

    status = Status.LANE_STUCK


class StoppingError(KvpackError):
    """The daemon stops."""

    status = Status.STOPPING


class NoMemoryError(KvpackError, MemoryError):
    """The daemon has no memory for it."""

    status = Status.NO_MEMORY


class SystemFailure(KvpackError):
    """A system call of the daemon failed; the text names it."""

    status = Status.SYSTEM


class UnreachableError(KvpackError, ConnectionError):
    """Decode's daemon could not reach prefill's."""

    status = Status.UNREACHABLE


class ProtocolError(KvpackError):
    """Something on the wire that is no message."""

    status = Status.PROTOCOL


class PoolGoneError(KvpackError):
    """The pool was paused or unregistered."""

    status = Status.POOL_GONE


class TransportError(KvpackError):
    """The data transport failed."""

    status = Status.TRANSPORT


class UnsupportedError(KvpackError):
    """Something that this build, daemon, or binding cannot do; the text names it."""

    status = Status.UNSUPPORTED


class CorruptError(KvpackError):
    """Sums of source and destination differ: the bytes at the destination are not the source's."""

    status = Status.CORRUPT


class BusyError(KvpackError, BlockingIOError):
    """Too much waits for the daemon already: process, then try again."""


class CancelledError(KvpackError):
    """The room ended without what was waited for."""


class CallError(KvpackError, OSError):
    """A system call of this process failed."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.errno = code


def _subclasses() -> Dict[Status, Type[KvpackError]]:
    found = {cls.status: cls for cls in KvpackError.__subclasses__() if cls.status}
    assert len(found) == len(Status) - 1
    return found


BY_STATUS: Dict[Status, Type[KvpackError]] = _subclasses()


def error_of(status: int, text: str, *, retry: bool = False) -> KvpackError:
    """The exception for a status; one that is newer than this package is a plain KvpackError."""
    try:
        return BY_STATUS[Status(status)](text, retry=retry)
    except (KeyError, ValueError):
        return KvpackError(f"status {status}: {text}", retry=retry)


_LOCAL: Dict[int, Type[KvpackError]] = {
    errno.EAGAIN: BusyError,
    errno.ETIMEDOUT: WaitTimeout,
    errno.ECANCELED: CancelledError,
    errno.ENOTCONN: DaemonLostError,
    errno.ECONNREFUSED: DaemonLostError,  # a socket that a dead daemon has left
    errno.EACCES: DeniedError,  # the socket's owner and mode
    errno.EPERM: DeniedError,
    errno.ENOMEM: NoMemoryError,
}
_WITH_STATUS = (errno.EINVAL, errno.ENOENT, errno.EREMOTEIO, errno.EPROTO, errno.EMSGSIZE)


def error_of_call(code: int, status: int, text: str) -> KvpackError:
    """The exception for what a library call returned (a positive errno) and said."""
    if code in _LOCAL:
        return _LOCAL[code](text or os.strerror(code))
    if code in _WITH_STATUS and status:
        return error_of(status, text)
    return CallError(text or os.strerror(code), code)
