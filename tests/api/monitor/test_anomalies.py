"""Anomalies: findings over time, and events, each with its beginning, its end and its evidence."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, get_args

import yaml

from api.monitor.anomalies import OF_EVENT, Anomaly, AnomalyLog
from api.monitor.counts import ANOMALIES
from api.monitor.state import Death, FindingKind, Grade, Leadership, RankView, Reading, WindowScore
from api.monitor.verdict import FAILED, FAILED_S, UNBALANCED, UNBALANCED_S, unready
from telemetry.state.events import Event, Outage
from tests.support.readings import changed, read
from tests.support.repository import ROOT
from tests.support.stores import MemoryStore

NOW = 10_000.0
LEADS, LEADERLESS = (
    {"controller": Leadership(leader, 0.0, why)}
    for leader, why in (("one", ""), ("", "no controller leads"))
)
SERVES = changed(
    read(MemoryStore("d"), NOW),
    **LEADS,
    run="a",
    started=NOW - 6000,
    step=7,
    ranks=tuple(RankView(rank, 7, 1, "idle", True, 0.1, 20.0, "") for rank in range(2)),
    progress_age_s=0.5,
    token_time=NOW - 2,
    sample_age_s=2.0,
)


def at(now: float, **changes: Any) -> Reading:
    return changed(SERVES, **({"time": now, "token_time": now - 2} | changes))


def silent(now: float, *, number: int = 1, since: float = NOW - 12, **changes: Any) -> Reading:
    ranks = list(SERVES.state.group.ranks)
    ranks[number] = replace(ranks[number], is_alive=False, age_s=now - since)
    return at(now, ranks=tuple(ranks), **changes)


def noted(log: AnomalyLog, seen: Reading) -> list[Anomaly]:
    log.note(seen)
    return log.page(None, 100)[0]


def windows(measured: float, first: float, last: float) -> tuple[WindowScore, ...]:
    times = [first + part * (last - first) / 9 for part in range(10)]
    return tuple(
        WindowScore(n, 4 * n, 4 * n + 3, measured, measured, 1, True, False, time)
        for n, time in enumerate(times)
    )


def failure(number: int, time: float, reason: str = "not staged in time") -> Event:
    detail = {"plan_id": number, "generation": None, "reason": reason}
    return Event(number, time, "abort", detail)


def test_silent_rank_is_open_since_its_last_report_and_ends_when_it_reports() -> None:
    log = AnomalyLog()
    death = Event(4, NOW - 11, "error", {"where": "ranks", "message": "rank 1 was killed"})
    (first, event) = noted(log, silent(NOW, events=(death,)))
    (same, _) = noted(log, silent(NOW + 5))
    (ended, _) = noted(log, at(NOW + 9))

    assert (first.kind, first.severity, first.ranks) == ("rank-silent", "warning", (1,))
    assert (first.since, first.until, first.events) == (NOW - 12, None, (4,))
    assert (event.kind, event.text) == ("error", "rank 1 was killed")
    assert event.since == event.until == NOW - 11
    assert (same.id, same.since, same.events) == (first.id, NOW - 12, (4,))
    assert (ended.id, ended.until) == (first.id, NOW + 9)


def unheard(now: float) -> Reading:
    """Of a run that has just begun: its ranks have not reported yet."""
    ranks = tuple(RankView(rank, 0, 0, "silent", False, None, None, "") for rank in range(2))
    begun = {"ranks": ranks, "started": NOW, "token_time": None, "sample_age_s": None}
    return at(now, **begun, progress_age_s=None)


def test_ranks_that_report_soon_after_a_start_are_no_anomaly() -> None:
    log, ranks = AnomalyLog(), SERVES.state.group.ranks
    first = {"started": NOW, "token_time": None, "sample_age_s": None}

    assert [one.kind for one in unheard(NOW + 1).findings] == ["rank-silent"]
    assert noted(log, unheard(NOW + 1)) == noted(log, unheard(NOW + 9)) == []
    reported = at(NOW + 10, ranks=ranks, **first)
    assert [one.kind for one in reported.findings] == ["no-tokens"]
    assert noted(log, reported) == noted(log, at(NOW + 11)) == []
    assert noted(log, unheard(NOW + 20)) == []  # of the next change: counted anew


def test_ranks_that_never_report_are_an_anomaly_since_they_were_looked_for() -> None:
    log = AnomalyLog()
    noted(log, unheard(NOW + 1))

    (found,) = noted(log, unheard(NOW + 12))
    (same,) = noted(log, unheard(NOW + 13))

    assert (found.kind, found.severity, found.since) == ("rank-silent", "critical", NOW + 1)
    assert (same.id, same.since) == (found.id, NOW + 1)


def test_outage_on_record_stands_once_with_its_own_dates_and_after_a_restart() -> None:
    outage = Outage(NOW - 1, NOW + 13, 14.0, "rank 1 was killed")
    event = Event(9, NOW + 14, "outage", vars(outage))
    death = Death(NOW, "rank 1 was killed")
    log = AnomalyLog()
    (live,) = noted(log, at(NOW + 12, token_time=NOW - 1, death=death))
    (ended,) = noted(log, at(NOW + 15, events=(event,)))

    assert (live.text, live.since) == ("no token for 13 s: rank 1 was killed", NOW - 1)
    assert (ended.id, ended.kind, ended.severity) == (live.id, "no-tokens", "critical")
    assert (ended.since, ended.until) == (NOW - 1, NOW + 13)
    assert ended.text == "no token for 14.0 s: rank 1 was killed"
    (known,) = noted(AnomalyLog(), at(NOW + 3600, events=(event,)))
    assert (known.since, known.until, known.text) == (ended.since, ended.until, ended.text)


def test_long_imbalance_is_a_notice_and_no_verdict() -> None:
    long = at(NOW, series=windows(1.5, NOW - 700, NOW - 1))
    short = at(NOW, series=windows(1.5, NOW - 500, NOW - 1))
    fell = at(NOW, series=(*windows(1.5, NOW - 700, NOW - 9), *windows(1.1, NOW - 8, NOW - 1)))

    (found,) = long.findings
    assert (found.kind, found.since) == ("unbalanced", NOW - 700)
    assert re.search(r"1\.50, .* 1\.43 for 700 s", found.text)
    assert (long.state.verdict, long.state.problems) == (Grade.SERVING, ())
    assert unready(long) is None
    assert [one.severity for one in noted(AnomalyLog(), long)] == ["notice"]
    assert short.findings == fell.findings == ()


def test_migrations_that_fail_again_are_a_notice_and_orders_are_none() -> None:
    failed = tuple(failure(n, NOW - 100 + n) for n in range(1, 5))
    ordered = tuple(failure(n, NOW - 100 + n, "movement is switched off") for n in range(1, 5))
    old = (failure(0, NOW - 2000), *failed[:3])

    (found,) = at(NOW, events=failed).findings
    assert (found.kind, found.since) == ("migrations-fail", NOW - 99)
    assert re.search("4 migrations .* 30 minutes, expected 3", found.text)
    for events in (ordered, old):
        assert at(NOW, events=events).findings == ()


def test_plan_that_gave_less_than_nothing_is_a_notice() -> None:
    detail = {"generation": 3, "promised": 0.2, "given": -0.05, "record": [0.2, -0.05]}
    kept = {"generation": 4, "promised": 0.2, "given": 0.1, "record": [0.4, 0.05]}
    events = (Event(1, NOW, "promise", detail), Event(2, NOW, "promise", kept))

    (found,) = noted(AnomalyLog(), at(NOW, events=events))
    assert (found.kind, found.severity) == ("gain-missed", "notice")
    assert re.search(r"generation 3 .*-0\.050.* 0\.200", found.text)


def test_figures_of_notices_are_those_of_the_alerts() -> None:
    path = ROOT / "api" / "metrics" / "observability" / "alerts.yaml"
    rules = [one for group in yaml.safe_load(path.read_text())["groups"] for one in group["rules"]]
    of = {rule["alert"]: rule for rule in rules}

    assert of["EplbUnbalanced"]["expr"].endswith(f"< {1 / UNBALANCED:.1f}")
    assert of["EplbUnbalanced"]["for"] == f"{UNBALANCED_S / 60:.0f}m"
    assert of["EplbRebalancesFail"]["expr"].endswith(f"[{FAILED_S / 60:.0f}m])) > {FAILED}")
    assert set(OF_EVENT) == set(ANOMALIES)


def test_each_kind_of_finding_is_in_the_operators_page() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()

    def is_there(kind: str) -> bool:
        alert = "Eplb" + kind.title().replace("-", "")
        return f"### {alert}\n" in page or f"`{kind}`" in page

    assert [kind for kind in get_args(FindingKind) if not is_there(kind)] == []
