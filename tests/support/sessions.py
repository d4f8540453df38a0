"""Processes of a session by the titles that ``ps`` shows: ``rank 1``, ``controller``, ``serve``."""

from __future__ import annotations

from pathlib import Path


def processes_of(session: int) -> dict[int, str]:
    """Title of each living process of a session, by id, in the order of their ids."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            title, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, its_session = rest.split()[:4]
        if int(its_session) == session and state not in "ZX":
            found[int(stat.parent.name)] = title
    return dict(sorted(found.items()))


def pids_of(session: int, title: str) -> list[int]:
    """Ids of a session's processes with a title, oldest first."""
    return [pid for pid, found in processes_of(session).items() if found == title]
