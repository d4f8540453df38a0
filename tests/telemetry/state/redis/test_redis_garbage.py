"""Any bytes in any value of a deployment in Redis: skipped and counted, or a StoreError in words.

Each field of each key is overwritten in turn, everything that can be asked of the store is asked,
and the field is put back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli.main import app
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import StoreError
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from eplb.versions import CONTROLLER, Announcement
from telemetry.load.rollup import MINUTE
from telemetry.state.events import Outage
from telemetry.state.groups import Joiner
from telemetry.state.live import LiveState
from telemetry.state.redis import RedisBackend
from telemetry.state.redis_link import RedisLink
from telemetry.state.runs import RankState, RunInfo
from telemetry.state.store import StateStore, open_store
from telemetry.state.tasks import TaskResult
from tests.support.redis_servers import RedisProcess
from tests.support.stores import make_placement, make_sample, sequences
from tests.telemetry.state.test_store_contract import CONTENT, PROPOSAL, RECORD, REPORT
from tests.telemetry.state.test_store_placements import make_migration

GARBAGE = {
    "no UTF-8": b"\xff\xfe\x00\x9d",
    "no number, no JSON": b"nonsense",
    "NaN": b"NaN",
    "a number past all bounds": b"1" + b"0" * 400,
    "deep nesting": b"[" * 100_000,
}
FIRST = make_placement(1)
MODEL, TOPOLOGY = ModelShape((3,), 3, 1, 1, 1), Topology.uniform(1, 2, 2)
RUN = RunInfo("run-1", 5.0, model_to_dict(MODEL), topology_to_dict(TOPOLOGY), 10, 2.5)
RANK = RankState("run-1", 0, 6.0, 40, 1, "idle", 0, 0, 3, 0)
_numbers = itertools.count()


def fill(store: StateStore) -> None:
    """Write a record of every kind."""
    store.begin_run(RUN)
    store.report(RANK)
    store.set_groups("", ["demo/a"])
    store.announce(Announcement(CONTROLLER, "c", "0.1", 3, 2))
    store.append([make_sample(rank, n) for rank in (0, 1) for n in (1, 2)])
    store.commit(FIRST, expected=None, reason="start")
    lease = store.acquire_lease("c", 10.0)
    assert lease is not None
    store.submit("plan", {"reason": "asked"})
    store.submit("plan", {"reason": "asked again"})
    task = store.claim(fence=lease.token)
    assert task is not None
    store.finish(task.id, "done", TaskResult())
    store.propose(replace(PROPOSAL, base_hash=FIRST.hash), CONTENT)
    store.publish(make_migration(FIRST, store.next_plan_id()))
    store.add_survivor_report(REPORT)
    store.recover(replace(RECORD, generation=1), expected_membership=0)
    store.offer_to_join(Joiner(3, "127.0.0.1", "a"))
    store.change_live({"movement": False}, reason="asked", by="alice")
    store.add_outage(Outage(100.0, 114.0, 14.0, "rank 1 was killed"))
    store.keep_audit_line("a line")


@pytest.fixture
def address(redis_server: RedisProcess) -> str:
    """URL of a server, with a prefix of the test's own."""
    return f"{redis_server.url}?prefix=garbage-{next(_numbers)}"


@pytest.fixture
def store(address: str) -> Iterator[StateStore]:
    """A store with a record of every kind."""
    opened = open_store(address, "demo")
    fill(opened)
    yield opened
    opened.close()


def link_of(store: StateStore) -> RedisLink:
    assert isinstance(store.backend, RedisBackend)
    return store.backend.link


def keys_of(store: StateStore) -> list[str]:
    """The keys of the deployment."""
    assert isinstance(store.backend, RedisBackend)
    return link_of(store).names(store.backend._prefix.replace("{", "[{]").replace("}", "[}]") + "*")


Use = Callable[[StateStore], object]
USES: dict[str, Use] = {
    "version": lambda s: s.version(),
    "wait": lambda s: s.wait(0, 0.0),
    "current_run": lambda s: s.current_run(),
    "runs": lambda s: s.runs(),
    "groups": lambda s: s.groups(),
    "rank_states": lambda s: [
        (r.report_every_s, r.clock_offset_s, r.silent_after_s) for r in s.rank_states("run-1")
    ],
    "announced": lambda s: s.announced(),
    "samples": lambda s: s.samples("run-1"),
    "samples_before": lambda s: s.samples_before(1e9),
    "sample_counts": lambda s: s.sample_counts("run-1"),
    "rollups": lambda s: s.rollups(MINUTE),
    "committed": lambda s: s.committed(),
    "placements": lambda s: s.placements(),
    "published": lambda s: s.published(),
    "survivor_reports": lambda s: s.survivor_reports("run-1", 0),
    "recovery": lambda s: s.recovery(),
    "epoch": lambda s: s.epoch(),
    "membership_change": lambda s: s.membership_change(),
    "wanted_ranks": lambda s: s.wanted_ranks(),
    "joiners": lambda s: s.joiners(),
    "proposed_group": lambda s: s.proposed_group(),
    "proposals": lambda s: s.proposals(),
    "proposal_content": lambda s: [s.proposal_content(p.id) for p in s.proposals()],
    "lease": lambda s: (s.lease(), s.latest_lease("deployment")),
    "tasks": lambda s: [s.tasks(state) for state in ("queued", "running", "done", "failed")],
    "live": lambda s: (s.live(), s.control()),
    "events": lambda s: (s.events(), s.latest_events(), list(s.events_onwards())),
    "audit_lines": lambda s: s.audit_lines(),
    "candidates": lambda s: s.candidates(),
    # What changes the store.
    "begin_run": lambda s: s.begin_run(RUN),
    "report": lambda s: s.report(replace(RANK, rank=7)),
    "announce": lambda s: s.announce(Announcement(CONTROLLER, "d", "0.1", 3, 2)),
    "append": lambda s: s.append([make_sample(0, next(_numbers) + 100)]),
    "next_plan_id": lambda s: s.next_plan_id(),
    "commit": lambda s: s.commit(FIRST, expected=None, reason="again"),
    "acquire_lease": lambda s: s.acquire_lease("c", 10.0),
    "submit": lambda s: s.submit("plan", {}),
    "claim": lambda s: s.claim(),
    "expire_live": lambda s: s.expire_live(),
    "change_live": lambda s: s.change_live({"movement": False}, reason="again"),
    "add_event": lambda s: s.add_event("note", {}),
    "add_outage": lambda s: s.add_outage(Outage(300.0, 301.0, 1.0, "rank 2 was killed")),
    "set_groups": lambda s: s.set_groups("", ["demo/a"]),
    "offer_to_join": lambda s: s.offer_to_join(Joiner(4, "127.0.0.1", "b")),
    "restore": lambda s: s.restore(RUN, FIRST, LiveState(), last_plan_id=9, reason="lost"),
    "keep_audit_line": lambda s: s.keep_audit_line("another"),
    "prune": lambda s: (s.prune(0.0), s.prune_rollups(MINUTE, 0.0), s.prune_events(1000)),
}


def refusals(address: str) -> list[str]:
    """Use a store that is opened anew in every way; return what ended in another error than its."""
    failures = list[str]()

    def attempt(name: str, use: Callable[[], Any]) -> Any:
        try:
            return use()
        except StoreError:
            return None
        except Exception as exc:
            failures.append(f"{name}: {exc!r:.200}")

    opened = attempt("open", lambda: open_store(address, "demo"))
    if opened is None:
        return failures
    try:
        for name, use in USES.items():
            attempt(name, lambda use=use: use(opened))  # type: ignore[misc]  # a default
    finally:
        opened.close()
    return failures


def changes_to(link: RedisLink, key: str, value: bytes) -> list[tuple[Any, ...]]:
    """Commands that each write garbage into a part of a key."""
    kind = link.read("TYPE", key)
    if kind == b"hash":
        names = [*link.read("HKEYS", key), value]
        return [("HSET", key, name, value) for name in names]
    if kind == b"set":
        return [("SADD", key, value)]
    if kind == b"zset":
        return [("ZADD", key, 1.0, value)]
    if kind == b"stream":
        fields = ("time", value, "kind", value, "detail", value)
        return [("XADD", key, "*", *words) for words in ((b"x", b"y"), ("s", value), fields)]
    return [("SET", key, value)]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_in_any_value_ends_in_no_other_error_than_the_store_s(
    store: StateStore, address: str, garbage: str
) -> None:
    link, failures = link_of(store), list[str]()
    whole = {key: link.read("DUMP", key) for key in keys_of(store)}
    for words in [words for key in whole for words in changes_to(link, key, GARBAGE[garbage])]:
        link.write(*words)
        failures += [f"{words[1]} {words[2]!r:.40}: {failure}" for failure in refusals(address)]
        for key in keys_of(store):
            link.write("DEL", key)
        for key, value in whole.items():
            link.write("RESTORE", key, 0, value, "REPLACE")

    assert failures == []


def test_records_that_cannot_be_read_are_skipped_and_counted_once(
    store: StateStore, caplog: pytest.LogCaptureFixture
) -> None:
    link = link_of(store)
    for key in keys_of(store):
        if key.endswith(":ranks:run-1"):
            link.write("HSET", key, "5", b"nonsense")
        if key.endswith(":events"):
            link.write("XADD", key, "*", "kind", "x")

    for _ in range(3):
        assert [state.rank for state in store.rank_states("run-1")] == [0]
        assert store.events()[-1].kind == "outage"

    assert store.skipped() == {"ranks:run-1": 1, "event": 1}
    assert store.refused() == {}
    assert sum("skipped" in record.message for record in caplog.records) == 2


def test_garbage_in_counters_of_readers_stops_no_writer(store: StateStore) -> None:
    link, (state,) = link_of(store), [key for key in keys_of(store) if key.endswith(":state")]
    (seen,) = [key for key in keys_of(store) if key.endswith(":seen:run-1")]
    for name in ("version", "last_event", "last_cursor"):
        link.write("HSET", state, name, b"\xffnan")
    for name in ("0", "mark 7"):
        link.write("HSET", seen, name, b"nonsense")

    assert store.append([make_sample(0, 3)]) == 1
    event = store.add_event("note", {})

    assert sequences(store)[-1] == 3
    assert store.events()[-1].id == event
    assert store.wait(0, 0.0) > 0


@pytest.mark.parametrize("field", ["live", "committed", "version"])
def test_status_of_a_store_with_garbage_is_told_without_a_traceback(
    store: StateStore, address: str, field: str
) -> None:
    (state,) = [key for key in keys_of(store) if key.endswith(":state")]
    link_of(store).write("HSET", state, field, b"\xff\xfe")

    told = CliRunner().invoke(app, ["status", "--store", address, "--deployment", "demo"])

    assert told.exit_code in (1, 2)
    assert isinstance(told.exception, SystemExit)
    assert field in told.output or field == "version"
