"""The console script. An interrupt ends it in one line, also while the commands are imported."""

from __future__ import annotations

from api.interrupts import leave, leaving_on_interrupt


def main() -> None:
    """Run the command line."""
    try:
        with leaving_on_interrupt():  # a command's own code runs with interrupts raised
            from api.cli.main import main as run_command

            run_command()
    except KeyboardInterrupt:
        leave()
