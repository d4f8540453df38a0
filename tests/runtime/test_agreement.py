"""Messages between ranks: JSON of a fixed size, and nothing that a peer sends is run."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from eplb.core.bounded_json import MAX_JSON_BYTES
from eplb.errors import RankError
from runtime.group import (
    MAX_MESSAGE_BYTES,
    MAX_REFUSAL_CHARACTERS,
    Rendezvous,
    first_refusal,
    gathered,
    gathered_large,
    reach,
)
from tests.support.limits import NEVER_S

RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]


class Payload:
    """Unpickled, it creates a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def test_ranks_gather_messages_by_rank(run_ranks: RunRanks) -> None:
    said = run_ranks(3, lambda rank: gathered({"rank": rank, "of": [None, "\u5b5d"]}, world()))

    assert said == [[{"rank": rank, "of": [None, "\u5b5d"]} for rank in range(3)]] * 3


def test_longest_refusal_of_any_characters_fits_a_message(run_ranks: RunRanks) -> None:
    text = "\U0001f600" * (MAX_REFUSAL_CHARACTERS + 1)
    said = run_ranks(2, lambda rank: first_refusal(text if rank == 1 else "", world()))

    assert said == [f"rank 1: {text[:-1]}"] * 2


def test_message_above_the_limit_is_rejected_before_it_is_sent(run_ranks: RunRanks) -> None:
    def send(rank: int) -> str:
        with pytest.raises(RankError, match=f"expected at most {MAX_MESSAGE_BYTES}"):
            gathered("x" * MAX_MESSAGE_BYTES, world())
        return "rejected"

    assert run_ranks(1, send) == ["rejected"]


@pytest.mark.parametrize("deep", [False, True], ids=["pickle", "deep JSON"])
def test_hostile_bytes_of_a_peer_are_rejected_and_never_run(
    run_ranks: RunRanks, tmp_path: Path, deep: bool
) -> None:
    canary = tmp_path / "code-ran"
    payload = b"[" * MAX_MESSAGE_BYTES if deep else pickle.dumps(Payload(canary))

    def exchange(rank: int) -> str:
        if rank == 0:
            with pytest.raises(RankError, match="rank 1 sent no message"):
                gathered("hello", world())
            return "rejected"
        sent = torch.frombuffer(bytearray(payload.ljust(MAX_MESSAGE_BYTES)), dtype=torch.uint8)
        dist.all_gather([torch.empty_like(sent) for _ in range(2)], sent)
        return "sent"

    assert run_ranks(2, exchange) == ["rejected", "sent"]
    assert not canary.exists()


def test_rendezvous_keeps_values_as_bytes_and_runs_none(tmp_path: Path) -> None:
    canary, rendezvous = tmp_path / "code-ran", Rendezvous()
    payload = pickle.dumps(Payload(canary))
    reach(rendezvous.handle, NEVER_S).set("key", payload)

    assert reach(rendezvous.handle, NEVER_S).get("key") == payload
    assert not canary.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_rendezvous_is_closed_to_another_user() -> None:
    rendezvous, nobody = Rendezvous(), 65534
    reach(rendezvous.handle, NEVER_S).set("key", b"secret")
    child = os.fork()
    if child == 0:
        os.setgid(nobody)
        os.setuid(nobody)
        try:
            Path(rendezvous.handle).read_bytes()
        except PermissionError:
            os._exit(0)
        os._exit(1)

    assert os.waitpid(child, 0)[1] == 0


def test_rendezvous_that_was_dropped_leaves_no_descriptor() -> None:
    handles = [Rendezvous().handle for _ in range(3)]

    # Other descriptors of this process come and go. A number that is used again is another file.
    places = [Path(handle) for handle in handles]
    links = [str(place.readlink()) for place in places if place.is_symlink()]
    assert [link for link in links if "eplb-rendezvous" in link] == []


def test_large_messages_of_all_ranks_are_gathered_and_too_large_ones_refused_on_all(
    run_ranks: RunRanks,
) -> None:
    def talk(rank: int) -> tuple[list[int], str]:
        found = gathered_large("x" * (MAX_MESSAGE_BYTES * (1 + rank)), world())
        try:
            gathered_large("x" * MAX_JSON_BYTES if rank == 1 else "short", world())
        except RankError as exc:
            return [len(text) for text in found], str(exc)
        return [], "not refused"

    for lengths, refusal in run_ranks(2, talk):
        assert lengths == [MAX_MESSAGE_BYTES, 2 * MAX_MESSAGE_BYTES]
        assert f"has {MAX_JSON_BYTES + 2} bytes, expected at most {MAX_JSON_BYTES}" in refusal
