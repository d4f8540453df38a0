"""A rank's place on its host: one process at a time, found at once and not by a hanging group.

The place is an abstract Unix socket: it goes with the process, and shows which process has it.
"""

from __future__ import annotations

import socket
import struct

from eplb.errors import RankError

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def claim_place(deployment: str, rank: int) -> socket.socket:
    """Take the place of a rank on this host, while the returned socket is open.

    Raises:
        RankError: another process has it.
    """
    place = socket.socket(socket.AF_UNIX)
    try:
        place.bind(_address(deployment, rank))
        place.listen(1)
    except OSError as exc:
        place.close()
        raise RankError(
            f"rank {rank} of deployment {deployment!r} is run by process "
            f"{holder_of(deployment, rank) or 'unknown'} of this host, expected none"
        ) from exc
    return place


def holder_of(deployment: str, rank: int) -> int | None:
    """Process id of who has the place of a rank on this host; None: no process."""
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(1.0)
        try:
            end.connect(_address(deployment, rank))
        except OSError:
            return None
        raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(raw)[0]
    return pid


def _address(deployment: str, rank: int) -> str:
    return f"\0eplb-rank-{deployment}-{rank}"
