"""Rendezvous of the ranks of one machine: a file without a name, for processes of one user.

A ``TCPStore`` requires no secret, lists its keys, which shows any prefix, and keeps what it
receives: a process that reaches its port can join as a rank, and fill its memory. A store in a
memory file has no port. For ranks of several machines an engine provides the rendezvous; see
``GlooVotes``.
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
        RuntimeError: the process that opened it has exited, or belongs to another user.
    """
    store = FileStore(handle)
    store.set_timeout(timedelta(seconds=deadline_s))
    return store
