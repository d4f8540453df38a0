"""The console script. An interrupt ends it in one line, also while the commands are imported."""

from __future__ import annotations

import atexit
import os
import signal

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


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


def leave_on_signals(*signals: signal.Signals) -> None:
    """End the process on an interrupt: an exception could come up anywhere in an import."""
    for one in (signal.SIGINT, *signals):
        if signal.getsignal(one) is not signal.SIG_IGN:  # nohup, or a shell's background job
            signal.signal(one, leave)


def interrupt_on_signals() -> None:
    """Have Ctrl-C, a service manager and a terminal that closes all raise KeyboardInterrupt."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(one) is not signal.SIG_IGN:
            signal.signal(one, signal.default_int_handler)


def leave(*_: object) -> None:
    """End the process in one line, with what was registered for its end."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    os.write(2, b"eplb: interrupted\n")
    atexit._run_exitfuncs()
    os._exit(INTERRUPTED)
