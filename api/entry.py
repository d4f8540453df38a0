"""The console script. An interrupt ends it in one line, also while the commands are imported."""

from __future__ import annotations

import gc

from api.interrupts import leave, leaving_on_interrupt


def main() -> None:
    """Run the command line."""
    # Imports make objects that stay: to look for garbage at every 700 takes a tenth of a start.
    gc.set_threshold(50_000)
    try:
        with leaving_on_interrupt():  # a command's own code runs with interrupts raised
            from api.cli.main import main as run_command

            run_command()
    except KeyboardInterrupt:
        leave()
