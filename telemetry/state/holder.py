"""Names of lease holders, and whether a holder's process is known to have died.

    HOST:PID:PLACE-START-RANDOM    gpu7:4242:9f31c2aa-8812345-5be012

PLACE is a digest of the boot id and the pid namespace, START the time at which the process started,
in ticks since the boot. On Linux a process of the same place checks in ``/proc`` whether the holder
still runs; a reused process id has another start. Other processes cannot know.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from functools import cache
from pathlib import Path

_NAME = re.compile(r"(?P<host>.*):(?P<pid>\d+):(?P<place>[0-9a-f]{8})-(?P<start>\d+)-[0-9a-f]{6}")
_NOWHERE = "0" * 8  # without /proc no process is known to have died


def new_holder() -> str:
    """Return a unique name of this process, with its host and number for operators."""
    pid = os.getpid()
    started = _start_of(pid) or 0
    return f"{socket.gethostname()}:{pid}:{_place()}-{started}-{secrets.token_hex(3)}"


def host_of(holder: str) -> str | None:
    """Return the host of a process's name; None where the name is of another form."""
    name = _NAME.fullmatch(holder)
    return name["host"] if name else None


def shown(holder: str) -> str:
    """Return a holder's name for display."""
    name = _NAME.fullmatch(holder)
    return f"process {name['pid']} on host {name['host']}" if name else repr(holder)


def is_here(holder: str) -> bool:
    """Return whether the process of that name is, or was, one of this machine and container."""
    name = _NAME.fullmatch(holder)
    return name is not None and name["place"] == _place() != _NOWHERE


def is_dead(holder: str) -> bool:
    """Return whether the process of that name has ended; False when unknown."""
    name = _NAME.fullmatch(holder)
    if name is None or not is_here(holder):
        return False
    if _start_of(1) is None:  # /proc hides the processes of others (hidepid)
        return False
    return _start_of(int(name["pid"])) != int(name["start"])


@cache
def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return _NOWHERE
    return hashlib.blake2b(f"{boot}{namespace}".encode(), digest_size=4).hexdigest()


def _start_of(pid: int) -> int | None:
    """Ticks from the boot to a process's start; None for one that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # After the name, which may hold anything: the state, and 19 fields on the start (proc(5)).
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
