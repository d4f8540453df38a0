"""Points of the compute stream, so that the host can ask what is complete without stopping it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from eplb.clock import Clock

POLL_S = 0.0002


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Make a stream of the lowest priority."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


class OnStream:
    """Orders what is in its ``with`` block on ``stream``; None is for a CPU, which has none.

    For one thread, bound to the stream's device. Made once and entered often: torch's own
    ``torch.cuda.stream`` takes longer than ordering a copy does.

    Attributes:
        back: the stream that the thread uses otherwise; None: it is asked for at each entry.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream
        self.back: torch.cuda.Stream | None = None
        self._found: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self._found = self.back or torch.cuda.current_stream()
            torch.cuda.set_stream(self.stream)

    def __exit__(self, *exc: object) -> None:
        if self._found is not None:
            torch.cuda.set_stream(self._found)


class Completion:
    """Everything that was ordered before this was made. On a CPU it is complete at once.

    Args:
        is_cuda: whether there is a device to be asked.
        stream: where the work was ordered; None: this thread's, which takes some time to look up.
    """

    def __init__(self, *, is_cuda: bool, stream: torch.cuda.Stream | None = None) -> None:
        self._event: Any = None
        if is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def is_complete(self) -> bool:
        """Return whether the stream has passed it."""
        return self._event is None or bool(self._event.query())

    def wait_until(
        self,
        deadline: float,
        *,
        poll_s: float = POLL_S,
        between: Callable[[], None] = lambda: None,
        clock: Clock = time.monotonic,
    ) -> bool:
        """Wait on the host; False if it is not complete by ``deadline``, a time of ``clock``.

        A device's event can be asked, or waited for without end, so this polls.

        Args:
            between: called before each pause; what it raises ends the wait.
        """
        while not self.is_complete():
            between()
            if clock() >= deadline:
                return False
            time.sleep(poll_s)
        return True

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` wait for it; the host continues."""
        if self._event is not None:
            self._event.wait(stream)

    def wait(self) -> None:
        """Wait until the stream has passed it."""
        if self._event is not None:
            self._event.synchronize()
