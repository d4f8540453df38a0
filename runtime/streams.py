"""Points of the compute stream, so that the host can ask what is complete without stopping it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Make a stream of the lowest priority."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Order on ``stream``; None is for a CPU, which has none."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        yield


class Completion:
    """Everything that was ordered before this was made. On a CPU it is complete at once."""

    def __init__(self, *, is_cuda: bool) -> None:
        self._event: Any = None
        if is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_complete(self) -> bool:
        """Say whether the stream has passed it."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until the stream has passed it."""
        if self._event is not None:
            self._event.synchronize()
