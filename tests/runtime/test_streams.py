"""A wait for a device is a poll: with a deadline, and with a look at the peers in between."""

from __future__ import annotations

import time

import pytest

from eplb.errors import RankError
from runtime.streams import Completion
from tests.support.limits import NEVER_S


class ArrivesAtLook(Completion):
    """Complete at the n-th time that it is asked, as a device that works on."""

    def __init__(self, number: int) -> None:
        super().__init__(is_cuda=False)
        self.left = number

    def is_complete(self) -> bool:
        self.left -= 1
        return self.left <= 0


def test_wait_polls_until_the_device_has_arrived() -> None:
    looks: list[int] = []
    completion = ArrivesAtLook(3)

    assert completion.wait_until(
        time.monotonic() + NEVER_S, poll_s=0.0, between=lambda: looks.append(completion.left)
    )
    assert looks == [2, 1]


def test_wait_past_its_deadline_ends_without_a_pause() -> None:
    assert not ArrivesAtLook(2).wait_until(time.monotonic() - 1, poll_s=3600.0)
    assert ArrivesAtLook(1).wait_until(time.monotonic() - 1)


def test_wait_ends_with_what_the_look_in_between_raises() -> None:
    def refuse() -> None:
        raise RankError("rank 3 died")

    with pytest.raises(RankError, match="rank 3 died"):
        ArrivesAtLook(2).wait_until(time.monotonic() + NEVER_S, between=refuse)
