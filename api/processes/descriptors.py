"""The number of files that a process may hold open."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> int:
    """Raise the limit of open descriptors to the hard limit; return it.

    Every process of a deployment calls this at its start. With the usual soft limit of 1,024 as
    many idle connections use up all descriptors, and then restarts fail too.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
