"""The console script. An interrupt ends it in one line, also while the commands are imported."""

from __future__ import annotations

import signal

from api.interrupts import leave, leave_on_signals


def main() -> None:
    """Run the command line."""
    ending = signal.getsignal(signal.SIGINT)
    leave_on_signals()
    from api.cli.main import main as run_command

    if ending is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_command()
    except KeyboardInterrupt:
        leave()
