"""A console whose reader may disconnect, as a terminal that is closed does."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO, Any, cast

from rich.console import Console


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
