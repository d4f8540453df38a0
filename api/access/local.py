"""What commands of this host do: who runs them, and a line of the audit for each."""

from __future__ import annotations

import os
import pwd
import socket
import time
from pathlib import Path

from api.access.audit import Audit, AuditEntry
from api.access.keys import Role


def local_actor() -> str:
    """Return the user of this process and its host, as the audit names them."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def note(state_dir: Path, deployment: str, action: str, reason: str, outcome: str) -> None:
    """Add what a command of this host did to the audit.

    Raises:
        AuditError: it cannot be written.
    """
    entry = AuditEntry(
        time=time.time(),
        deployment=deployment,
        actor=local_actor(),
        role=Role.ADMIN.label,
        address="local",
        request="",
        action=action,
        reason=reason,
        outcome=outcome,
    )
    Audit(state_dir).append(entry)
