"""Host memory between a rank's device and the network; a CPU's ranks need none.

The copies run on a stream of their own of the lowest priority: no kernel of serving waits for them,
and they wait for none. Pinned, so that a copy engine makes them.
"""

from __future__ import annotations

import torch

from eplb.errors import MigrationError
from runtime.streams import Completion, OnStream, new_stream


class Bounce:
    """One piece of pinned memory and a stream; used by one thread at a time.

    Args:
        device: the other end.
        num_bytes: to pin now, because it takes longer than copying them; more is pinned if needed.
    """

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        self._device = device
        self._stream = OnStream(new_stream(device))
        self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=num_bytes > 0)
        self._last = Completion(is_cuda=False)  # completion of the newest copy out of it or into it

    def take_out(self, part: torch.Tensor, deadline: float) -> memoryview:
        """Copy bytes of the device here; good until the next call.

        Raises:
            MigrationError: the device is not done in time.
        """
        room = self._room(len(part), deadline)
        with self._stream:
            room.copy_(part, non_blocking=True)
            self._last = Completion(is_cuda=True, stream=self._stream.stream)
        self._wait(deadline)
        return room.numpy().data

    def room(self, num_bytes: int, deadline: float) -> memoryview:
        """Memory to be filled, and then put in; what was put in before has landed.

        Raises:
            MigrationError: it has not, in time.
        """
        return self._room(num_bytes, deadline).numpy().data

    def put_in(self, into: torch.Tensor) -> Completion:
        """Order the copy of what ``room`` was filled with to the device."""
        with self._stream:
            into.copy_(self._pinned[: len(into)], non_blocking=True)
            self._last = Completion(is_cuda=True, stream=self._stream.stream)
        return self._last

    def _room(self, num_bytes: int, deadline: float) -> torch.Tensor:
        self._wait(deadline)
        if len(self._pinned) < num_bytes:  # once: chunks and pieces have one size each
            self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return self._pinned[:num_bytes]

    def _wait(self, deadline: float) -> None:
        if not self._last.wait_until(deadline):
            raise MigrationError(f"a copy between {self._device} and the network timed out")
