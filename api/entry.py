"""The console script. An interrupt ends it in one line, also while the commands are imported."""

from __future__ import annotations

from api.interrupts import leave, leaving_on_interrupt


def main() -> None:
    """Run the command line."""
    with leaving_on_interrupt():
        from api.cli.main import main as run_command
    try:
        run_command()
    except KeyboardInterrupt:
        leave()
