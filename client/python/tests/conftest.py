# SPDX-License-Identifier: Apache-2.0
import os
import sys
from pathlib import Path
from typing import Iterator, Tuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples"), str(HERE.parent)]

import pytest  # noqa: E402
from rig import Daemon, Rig  # noqa: E402


@pytest.fixture(scope="session")
def nodes() -> Iterator[Tuple[Daemon, Daemon]]:
    """Two daemons for tests that leave nothing behind: prefill's and decode's."""
    with Rig() as rig:
        os.environ["KVPACK_SOCKET"] = rig.daemon("p0").socket
        yield rig.daemon("p0"), rig.daemon("d0")


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Daemons of its own."""
    with Rig() as rig:
        yield rig
