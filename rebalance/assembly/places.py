"""A rank's place on its host: one process at a time, found at once and not by a hanging group.

``eplb launch`` also learns here what its ranks wait for while they start, in which run they serve,
and which have left their serving loops.

The place is an abstract Unix socket: it goes with the process, and shows which process has it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

from eplb.errors import RankError
from rebalance.weights.link import local

HALT_FILE_VARIABLE = "EPLB_HALT_FILE"  # a pipe of eplb launch, below /proc
MEMBERS_VARIABLE = "EPLB_MEMBERS"  # ranks that start together, "0,1,3"; missing: all
JOINS_VARIABLE = "EPLB_JOINS"  # set for a rank that joins others which serve
LOOPBACK = "127.0.0.1"
WORDS = 1000  # characters of a report: one write of it is not mixed with another (PIPE_BUF)

log = logging.getLogger(__name__)


def claim_place(deployment: str, rank: int, address: str = LOOPBACK) -> socket.socket:
    """Take the place of a rank on this host, while the returned socket is open.

    Args:
        deployment: its name.
        rank: the rank.
        address: of the host in the deployment; a machine may be several hosts, with an address of
            its own for each.

    Raises:
        RankError: another process has it.
        MigrationError: the kernel refuses.
    """
    place = local.listen_under(_socket_of(deployment, rank, address))
    if place is None:
        raise RankError(
            f"rank {rank} of deployment {deployment!r} is run by process "
            f"{holder_of(deployment, rank, address) or 'unknown'} of this host, expected none"
        )
    return place


def holder_of(deployment: str, rank: int, address: str = LOOPBACK) -> int | None:
    """Process id of who has the place of a rank on this host; None: no process."""
    return local.holder_of(_socket_of(deployment, rank, address))


def report_halt(rank: int, environ: Mapping[str, str]) -> None:
    """Tell the launcher, if there is one, that a rank has left its serving loop in order.

    What follows may take long on a busy host: the last reports, and the end of the interpreter.
    """
    _report(f"halted {rank}\n", environ)


def report_wait(rank: int, what: str, environ: Mapping[str, str]) -> None:
    """Tell the launcher, if there is one, what a rank waits for, or why its start failed."""
    _report(f"waits {rank} {' '.join(what.split())[:WORDS]}\n", environ)


def report_run(rank: int, run: str, environ: Mapping[str, str]) -> None:
    """Tell the launcher, if there is one, in which run a rank will serve."""
    _report(f"begins {rank} {run}\n", environ)


def report_ready(rank: int, environ: Mapping[str, str]) -> None:
    """Tell the launcher, if there is one, that the start of a rank is over."""
    _report(f"serves {rank}\n", environ)


def _report(lines: str, environ: Mapping[str, str]) -> None:
    if (path := environ.get(HALT_FILE_VARIABLE)) is None:
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, lines.encode())
        finally:
            os.close(descriptor)
    except OSError as exc:  # the launcher has ended
        log.warning("the launcher is not told %r: %s", lines, exc)


def _socket_of(deployment: str, rank: int, address: str) -> str:
    return f"\0eplb-rank-{deployment}-{rank}-{address}"
