"""Ranks join and leave a demo that serves: real processes, every checked answer right."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from operator import le
from pathlib import Path
from typing import Any

import pytest

from eplb.migration.serialisation import topology_from_dict
from telemetry import open_store
from telemetry.state.store import StateStore
from tests.support.demo import StartDemo, events_of
from tests.support.repository import ROOT

TEXT = ("--text", str(ROOT / "LICENSE"), "--text", str(ROOT / "README.md"))
ALL = [0, 1, 2, 3]


def regrouped(membership: int) -> Callable[[StateStore], Any]:
    def found(store: StateStore) -> Any:
        events = [one.detail for one in events_of(store, "regrouped")]
        return next((one for one in events if one["membership"] == membership), None)

    return found


def serve(ranks: Sequence[int]) -> Callable[[StateStore], bool]:
    """All of these ranks, and no others, have begun steps of the current run."""

    def found(store: StateStore) -> bool:
        run = store.current_run()
        if run is None:
            return False
        alive = topology_from_dict(dict(run.topology)).alive.nonzero()[0].tolist()
        reports = {one.rank for one in store.rank_states(run.run) if one.step > 0}
        return alive == list(ranks) and reports == set(ranks)

    return found


def start_serving(folder: Path, start_demo: StartDemo, **settings: Any) -> Any:
    demo = start_demo(folder, "--serve", *TEXT, serve_on=True, slots_per_rank=5, **settings)
    demo.sees("serving", serve(ALL))
    return demo


def want(demo: Any, name: str, ranks: Sequence[int], now: Sequence[int]) -> None:
    with closing(open_store(demo.state_dir / "store.sqlite", "demo")) as store:
        alive = [rank in now for rank in ALL]
        store.change_membership(name, ranks, asked=name, alive=alive, reason=name, by="test")


def rank_pids(demo: Any) -> dict[str, int]:
    titles = {title: pid for pid, title in demo.processes().items()}
    return {title: pid for title, pid in titles.items() if title.startswith("rank ")}


@pytest.mark.slow
def test_killed_rank_is_started_again_and_joins_those_that_serve(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_serving(tmp_path, start_demo)
    before = rank_pids(demo)

    demo.kill("rank 0")  # where all ranks met
    found = demo.sees("four ranks", regrouped(2))
    demo.sees("its steps", serve(ALL))

    assert (found["survivors"], found["joined"], found["left"]) == (ALL, [0], [])
    after = rank_pids(demo)
    assert after.keys() == before.keys()
    assert {title for title in after if after[title] != before[title]} == {"rank 0"}
    assert demo.halts_right()["deaths"] == 1


def ask(demo: Any, *, epoch: int, **body: Any) -> tuple[int, dict[str, Any]]:
    """Ask the service of a demo for other ranks; the status and the body of its answer."""
    headers = {"if-match": f'"{epoch}"'}
    given = {"reason": "test", "dry_run": False} | body
    answer = demo.post("/api/v1/membership", given, headers=headers)
    return answer.status_code, answer.json()


@pytest.mark.slow
def test_retired_rank_exits_and_comes_back_once_it_is_wanted(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_serving(tmp_path, start_demo)
    before = rank_pids(demo)

    status, asked = ask(demo, epoch=0, id="op-1", retire=[2])
    retired = demo.sees("three ranks", regrouped(1))
    demo.sees("their steps", serve([0, 1, 3]))
    demo.sees("its end", lambda _: "rank 2" not in rank_pids(demo))
    refusals = [ask(demo, epoch=1, id="op-1", to=2), ask(demo, epoch=0, id="op-2", to=2)]
    repeated = ask(demo, epoch=1, id="op-1", retire=[2])
    grown_status, _ = ask(demo, epoch=1, id="op-3", to=4)
    grown = demo.sees("four ranks", regrouped(2))
    demo.sees("its steps", serve(ALL))

    assert (status, asked["operation"]["wanted"]) == (200, [0, 1, 3])
    assert [one[0] for one in refusals] == [409, 412]
    assert 'asked for {"retire": [2]}, found {"to": 2}' in refusals[0][1]["detail"]
    assert "the epoch is 1, expected 0" in refusals[1][1]["detail"]
    assert (repeated[0], repeated[1]["operation"]["ended"]) == (200, "done")
    assert grown_status == 200
    assert (retired["survivors"], retired["joined"], retired["left"]) == ([0, 1, 3], [], [2])
    assert (grown["survivors"], grown["joined"], grown["left"]) == (ALL, [2], [])
    after = rank_pids(demo)
    assert {title for title in before if after[title] != before[title]} == {"rank 2"}
    assert demo.halts_right()["deaths"] == 0


@pytest.mark.slow
def test_rank_has_no_more_open_files_and_threads_after_further_changes(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_serving(tmp_path, start_demo)

    def used() -> list[int]:
        process = Path("/proc", str(rank_pids(demo)["rank 0"]))
        return [len(list((process / of).iterdir())) for of in ("fd", "task")]

    for number, ranks in enumerate([[0, 1, 2], ALL, [0, 1, 2], ALL, [0, 1, 2], ALL], start=1):
        want(demo, f"change {number}", ranks, ALL if ranks != ALL else [0, 1, 2])
        demo.sees("the next group", regrouped(number))
        demo.sees("its steps", serve(ranks))
        if number == 2:
            first = used()
    demo.sees("no more than after the first ones", lambda _: all(map(le, used(), first)))

    demo.halts_right()


def joining(dead: set[str], num_joins: int = 0) -> Callable[[StateStore], str | int]:
    """The process of rank 3 that offers itself or that a proposal admits; none that is dead.

    A process that joins withdraws its offer, and its proposal is over. On a busy machine that may
    be before either is seen: then the number of joins, once it is larger than ``num_joins``.
    """

    def found(store: StateStore) -> str | int:
        proposal = store.proposed_group()
        processes = {one.process for one in store.joiners()}
        processes |= set(proposal.joiners.values()) if proposal is not None else set()
        joins = len(events_of(store, "regrouped"))
        return next(iter(processes - dead), joins if joins > num_joins else 0)

    return found


@pytest.mark.slow
def test_rank_that_dies_three_times_while_it_joins_does_so_in_the_end_and_the_others_serve_on(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_serving(tmp_path, start_demo)
    before = rank_pids(demo)
    dead, num_joins, killed = set[str](), 0, [demo.kill("rank 3")]

    def is_there(_: StateStore) -> bool:
        return rank_pids(demo).get("rank 3") not in {None, *killed}

    while len(dead) < 3:
        found = demo.sees("its next process", joining(dead, num_joins))
        if isinstance(found, str):
            dead.add(found)
        else:  # it was not seen to join: it dies as a member, and comes back
            num_joins = found
        demo.sees("its pid", is_there)
        killed.append(demo.kill("rank 3"))
    demo.sees("four ranks", lambda store: is_there(store) and serve(ALL)(store))

    after = rank_pids(demo)
    assert {title for title in before if after[title] != before[title]} == {"rank 3"}
    demo.halts_right()


@pytest.mark.slow
def test_member_that_dies_while_the_next_group_forms_is_left_out_and_both_join_later(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_serving(tmp_path, start_demo)
    before = rank_pids(demo)

    demo.kill("rank 3")
    demo.sees("its next process", joining(set()))
    demo.kill("rank 0")  # the member that proposes
    demo.sees("four ranks", serve(ALL))

    after = rank_pids(demo)
    assert {title for title in before if after[title] != before[title]} == {"rank 0", "rank 3"}
    demo.halts_right()


@pytest.mark.slow
def test_start_of_all_ranks_takes_those_that_should_serve_alone(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_serving(tmp_path, start_demo)
    want(demo, "retire", [1, 2, 3], ALL)
    demo.sees("three ranks", serve([1, 2, 3]))

    for pid in rank_pids(demo).values():
        os.kill(pid, signal.SIGSTOP)
    for pid in rank_pids(demo).values():
        os.kill(pid, signal.SIGKILL)

    def started(store: StateStore) -> bool:
        run = store.current_run()
        return run is not None and "-member" not in run.run and serve([1, 2, 3])(store)

    demo.sees("a start of three ranks", started)

    assert rank_pids(demo).keys() == {"rank 1", "rank 2", "rank 3"}
    demo.halts_right()
