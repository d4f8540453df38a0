"""Processes of a session, and what the kernel knows of each: memory, open files, threads, time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Reading:
    """One process at one moment.

    What a leak grows is ``own_kib``: memory that no file is behind. Mapped files, such as the code
    of libraries, are divided among the processes that map them, and shift when one of them ends.
    """

    pid: int
    own_kib: int  # anonymous memory, and a part of shared memory
    pss_kib: int
    rss_kib: int
    open_files: int
    threads: int
    cpu_s: float  # since its start


def session_processes(session: int) -> Iterator[int]:
    """Yield the living processes of a session."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, found = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended
            continue
        if int(found) == session and state not in "ZX":
            yield int(stat.parent.name)


def read_process(pid: int) -> Reading | None:
    """Read one process; None if it has ended."""
    here = Path(f"/proc/{pid}")
    try:
        memory = _numbers(here / "smaps_rollup")
        threads = _numbers(here / "status")["Threads"]
        open_files = len(list((here / "fd").iterdir()))
        times = (here / "stat").read_text().rpartition(")")[2].split()[11:13]
    except (OSError, KeyError):
        return None
    cpu_s = sum(map(int, times)) / TICKS_PER_S
    own = memory["Pss_Anon"] + memory["Pss_Shmem"]
    return Reading(pid, own, memory["Pss"], memory["Rss"], open_files, threads, cpu_s)


def name_of(pid: int, role: str) -> str:
    """Role and title of a process; a rank has its number."""
    here = Path(f"/proc/{pid}")
    try:
        for variable in (here / "environ").read_bytes().split(b"\0"):
            if variable.startswith(b"RANK="):
                return f"rank {variable[5:].decode()}"
        title = (here / "comm").read_text().strip()
    except OSError:
        return role
    return f"{role}: {title}"


def _numbers(path: Path) -> dict[str, int]:
    found = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if (words := rest.split()) and words[0].isdecimal():
            found[name] = int(words[0])
    return found
