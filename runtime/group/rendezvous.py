"""Where ranks of one machine meet: a file without a name that only processes of one user open.

A ``TCPStore`` asks nobody who connects for a secret, lists its keys, which shows any prefix, and
keeps what it is sent: whoever reaches its port joins as a rank, and fills its memory. A store in a
memory file has no port. Ranks of several machines are started by an engine, with a rendezvous of
its own; see ``GlooVotes``.
"""

from __future__ import annotations

import os
import weakref
from datetime import timedelta

from torch._C._distributed_c10d import FileStore, Store


class Rendezvous:
    """Open as long as this object lives, in a process that outlives every rank that uses it."""

    def __init__(self) -> None:
        descriptor = os.memfd_create("eplb-rendezvous")
        os.fchmod(descriptor, 0o600)
        weakref.finalize(self, os.close, descriptor)
        self.handle = f"/proc/{os.getpid()}/fd/{descriptor}"  # for ranks of this host and user


def reach(handle: str, deadline_s: float) -> Store:
    """Open the rendezvous of another process.

    Args:
        handle: of a ``Rendezvous`` that is open.
        deadline_s: for each wait for another rank.

    Raises:
        RuntimeError: the process that opened it is gone, or of another user.
    """
    store = FileStore(handle)
    store.set_timeout(timedelta(seconds=deadline_s))
    return store
