"""Keeps gloo's listeners from taking connections once all ranks of a group are connected.

gloo listens as long as its group lives, requires no secret and never closes unexpected connections:
each one costs a descriptor, until none is left and the rank aborts. After a group is formed no
process has a reason to connect. The listeners cannot be closed from here, so a filter drops each
packet that would open a connection; open connections have other sockets.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h; Python does not name it
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # a classic BPF program: return 0 bytes


@contextmanager
def gloo_listeners_closed() -> Iterator[None]:
    """Form gloo groups inside; afterwards what they listen on takes no further connection.

    Nothing else in this process may begin to listen meanwhile. NCCL opens connections later, too:
    a group of both backends must not be formed inside.
    """
    before = {inode for inode, _ in listeners()}
    yield
    for inode, listening in listeners():
        if inode not in before:
            program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
            pointed = struct.pack("HL", 1, ctypes.addressof(program))
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointed)


def listeners() -> Iterator[tuple[int, socket.socket]]:
    """Inode and a duplicate, closed after its turn, of each TCP socket that listens here."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            descriptor = os.dup(int(entry.name))
        except OSError:  # closed meanwhile; the folder itself
            continue
        found = os.fstat(descriptor)
        if not stat.S_ISSOCK(found.st_mode):
            os.close(descriptor)
            continue
        with closing(socket.socket(fileno=descriptor)) as end:
            is_tcp = end.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield found.st_ino, end
