"""Output of commands: untrusted text without control sequences, errors, and a terminal that closes.

Untrusted text stays on one line and moves no cursor.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import IO, Any, cast

from rich.console import Console

# C0 and C1 controls, DEL, line and paragraph separators, marks and overrides of direction, and
# surrogates, which no stream can encode.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Escape what moves the cursor, begins a line or changes the direction of the text."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def print_error(sentence: object) -> None:
    """Print a refusal on the error stream."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    errors.print(printable(f"eplb: {sentence}"), markup=False)


class UnbreakableStream:
    """A stream that drops its input once it has no reader: a closed terminal ends no run."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or drop."""
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Flush, or drop."""
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self) -> None:
        """Discard what follows and what is still buffered."""
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def unbreakable_console() -> Console:
    """Make a console on the standard output."""
    return Console(file=cast(IO[str], UnbreakableStream(sys.stdout)))
