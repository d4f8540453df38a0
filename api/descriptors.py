"""How many descriptors this process may have."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> int:
    """Raise the limit of descriptors to the hard limit, for children too; return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
