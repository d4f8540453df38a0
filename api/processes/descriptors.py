"""The number of files that a process may hold open."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> int:
    """Raise the limit of open descriptors to the hard limit; return it.

    Every process of a deployment calls this at its start. The usual soft limit of 1,024 is used up
    by as many stray connections, and what needs a descriptor then fails, restarts included.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
