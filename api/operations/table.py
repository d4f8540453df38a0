"""The table of operations: every route of the admin API, and every command that asks it."""

from __future__ import annotations

from api.operations import (
    membership,
    pins,
    placements,
    plans,
    ranks,
    service,
    switches,
    watching,
)
from api.operations.declaration import AdminCommand, Operation

_DECLARED = [
    one
    for theme in (service, watching, placements, plans, ranks, membership, pins, switches)
    for one in vars(theme).values()
]
OPERATIONS = [one for one in _DECLARED if isinstance(one, Operation)]
COMMANDS = [one for one in _DECLARED if isinstance(one, AdminCommand)]
GROUPS = {"placements": placements.GROUP, "pins": pins.GROUP}  # group of commands -> help
