"""Operations on the ranks that serve: one at a time, by epoch and id, and how they end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eplb.errors import StaleRevision
from eplb.migration.recovery import Recovery
from telemetry.state.live import LiveState
from telemetry.state.membership import MembershipChange, MembershipRefused
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.stores import MemoryStore, make_placement

ALL = (0, 1, 2, 3)
RUN = RunInfo("run-1", 5.0, {}, {"alive": [True] * 4}, 10)
DEATH = Recovery(1, "run-1", (0, 1, 2), 5, 0, 0, "rank 3 died", 9.5)


def ask(store: StateStore, wanted: tuple[int, ...], **changes: Any) -> MembershipChange:
    values: dict[str, Any] = {
        "change_id": "op-1",
        "asked": {"to": len(wanted)},
        "alive": [True] * 4,
        "reason": "fewer",
        "by": "alice",
    }
    return store.change_membership(wanted=wanted, **(values | changes))


def test_repeated_operation_gives_the_first_answer_also_after_its_end(store: StateStore) -> None:
    first = ask(store, (0, 1, 2))
    assert ask(store, (0, 1, 2), reason="again") == first
    assert store.end_membership_change("op-1", "failed", why="no room")
    ask(store, (0, 1), change_id="op-2")

    assert ask(store, (0, 1, 2)) == replace(first, ended="failed", why="no room", ended_at=1000.0)


def test_repeated_id_with_another_request_is_refused(store: StateStore) -> None:
    ask(store, (0, 1, 2))

    with pytest.raises(MembershipRefused, match=r'"op-1".*|op-1.*"to": 3.*"to": 2'):
        ask(store, (0, 1))


def test_second_operation_is_refused_while_one_is_open(store: StateStore) -> None:
    ask(store, (0, 1, 2))

    with pytest.raises(MembershipRefused, match=r"'op-1' is open.*\[0, 1, 2\]"):
        ask(store, (0, 1), change_id="op-2")

    assert store.end_membership_change("op-1", "cancelled", why="not now")
    assert ask(store, (0, 1), change_id="op-2").ended == ""


def test_stale_epoch_is_refused_and_changes_nothing(store: StateStore) -> None:
    assert store.recover(DEATH, expected_membership=0) is not None
    before = store.events()

    with pytest.raises(StaleRevision, match="epoch 0, found epoch 1"):
        ask(store, (0, 1), expected=0)

    assert (store.events(), store.membership_change()) == (before, None)
    assert ask(store, (0, 1), expected=1).membership == store.epoch() == 1


def test_operation_that_wants_the_ranks_that_serve_is_done_at_once(store: StateStore) -> None:
    done = ask(store, (0, 1, 2), alive=[True, True, True, False])

    assert (done.ended, done.should_serve) == ("done", (0, 1, 2))


def test_open_operation_has_the_seconds_until_its_deadline(store: StateStore) -> None:
    found = ask(store, (0, 1, 2), within_s=60.0)

    assert [found.left_s(now) for now in (1000.0, 1045.0, 1070.0)] == [60.0, 15.0, 0.0]
    assert replace(found, ended="done").left_s(1045.0) is None
    assert ask(store, (0, 1, 2)).until == 1060.0  # repeated: the first answer


@pytest.mark.parametrize("ended", ["failed", "cancelled"])
def test_operation_without_success_leaves_wanted_what_was_wanted_before(
    store: StateStore, ended: Any
) -> None:
    ask(store, (0, 1, 2), alive=[True, True, True, False])
    ask(store, (0, 1), change_id="op-2")

    assert store.end_membership_change("op-2", ended, why="it was")

    latest = store.membership_change()
    assert latest is not None
    assert (latest.wanted, latest.should_serve) == ((0, 1), (0, 1, 2))


@pytest.mark.parametrize("ended", ["failed", "cancelled"])
def test_first_operation_without_success_leaves_all_ranks_wanted_where_one_had_died(
    store: StateStore, ended: Any
) -> None:
    assert ask(store, (0, 1), alive=[True, True, True, False]).before == ALL

    assert store.end_membership_change("op-1", ended, why="it was")

    assert store.wanted_ranks() == ALL


def test_operation_outlasts_the_loss_of_the_store(store: StateStore) -> None:
    known = ask(store, (0, 1, 2))
    emptied = MemoryStore("emptied")

    assert emptied.restore(
        RUN, make_placement(7), LiveState(), last_plan_id=1, reason="lost", membership=known
    )

    assert emptied.wanted_ranks() == (0, 1, 2)
    assert emptied.change_of_id("op-1") == known
    event = emptied.events()[0]
    assert (event.kind, event.detail["ranks"]) == ("members", [3])
    assert event.is_about(3)
    assert not event.is_about(2)


def test_run_of_other_ranks_than_the_wanted_leaves_the_operation_open(store: StateStore) -> None:
    store.begin_run(RUN)
    ask(store, (0, 1))

    store.begin_run(replace(RUN, run="run-2", topology={"alive": [True, True, True, False]}))

    latest = store.membership_change()
    assert latest is not None
    assert latest.ended == ""


def test_start_over_another_number_of_ranks_leaves_no_older_wish(store: StateStore) -> None:
    store.begin_run(RUN)
    ask(store, (0, 1))

    store.begin_run(replace(RUN, run="run-2", topology={"alive": [True] * 8}))

    assert store.membership_change() is None
    ended = store.change_of_id("op-1")
    assert ended is not None
    assert (ended.ended, ended.why) == ("cancelled", "8 ranks start in place of 4")
