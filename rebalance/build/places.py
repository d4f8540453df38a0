"""A rank's place on its host: one process at a time, found at once and not by a hanging group.

``eplb launch`` also learns here which ranks have left their serving loops.

The place is an abstract Unix socket: it goes with the process, and shows which process has it.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Mapping

from eplb.errors import RankError

HALT_FILE_VARIABLE = "EPLB_HALT_FILE"  # a pipe of eplb launch, below /proc

log = logging.getLogger(__name__)

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


def report_halt(rank: int, environ: Mapping[str, str]) -> None:
    """Tell the launcher, if there is one, that a rank has left its serving loop in order.

    What follows may take long on a busy host: the last reports, and the end of the interpreter.
    """
    if (path := environ.get(HALT_FILE_VARIABLE)) is None:
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as exc:  # the launcher has ended
        log.warning("rank %d: the launcher is not told that serving has ended: %s", rank, exc)
        return
    try:
        os.write(descriptor, f"{rank}\n".encode())
    except OSError as exc:
        log.warning("rank %d: the launcher is not told that serving has ended: %s", rank, exc)
    finally:
        os.close(descriptor)


def _address(deployment: str, rank: int) -> str:
    return f"\0eplb-rank-{deployment}-{rank}"
