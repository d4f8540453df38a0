"""What a deployment tells of itself while faults pass, against what its tokens say.

Truth: the times of steps that ranks wrote down. Told: the verdict and ``token_age_s`` of
``GET /api/v1/state``, ``eplb_unserved_seconds_total`` of ``/metrics``, anomalies, and the alerts of
a Prometheus with the shipped rules. Times are monotonic.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

import httpx

from benchmarks.faults.deployments import TwoHostDeployment
from benchmarks.operating.prometheus_server import PROMETHEUS, Prometheus

POLL_S = 0.2
UNREACHABLE = "unreachable"  # no answer of the service: Prometheus has EplbTargetLost for that
OUTAGE_S = 1.0  # without a token; a step comes every 0.05 s, and later where cores are busy
STALL_S = 0.3  # gaps from here to OUTAGE_S may be restarts, which the product counts
GRACE_S = 2.0
HISTORY_S = 900  # longer than a case, for questions to Prometheus
BEFORE_S = 3.0  # an alert that was evaluated so shortly before a fault is not of it
# Of balance: this load, which moves experts all the time, raises them without any fault.
OF_BALANCE = frozenset(
    {"EplbFlapping", "EplbRebalanceStuck", "EplbPlacementMismatch", "EplbUnbalanced", "EplbDrift"}
)
UNSERVED = re.compile(r"^eplb_unserved_seconds_total\{[^}]*\} (\S+)$", re.MULTILINE)
Span = tuple[float, float]


@dataclass(frozen=True)
class Sample:
    """One look."""

    time: float
    verdict: str
    reason: str
    token_age_s: float | None
    unserved_s: float | None


def gaps(tokens: Sequence[float], since: float, until: float, least_s: float) -> list[Span]:
    """Find the stretches without a token that reach into a time; the last may still go on."""
    times = [at for at in tokens if at <= until]
    first = max(0, bisect_right(times, since) - 1)
    return [(a, b) for a, b in pairwise([*times[first:], until]) if b - a > least_s]


class Observer:
    """Looks at a deployment in a thread, until it is closed."""

    def __init__(self, deployment: TwoHostDeployment, folder: Path) -> None:
        self._deployment, self._closing = deployment, Event()
        self.samples: list[Sample] = []
        self._prometheus = None
        if PROMETHEUS is not None:
            folder.mkdir()
            credentials = {"authorization": {"credentials": deployment.token}}
            self._prometheus = Prometheus(folder, deployment.target, **credentials)
        self._client = httpx.Client(
            base_url=deployment.client.base_url,
            headers=deployment.client.headers,
            timeout=GRACE_S,
            trust_env=False,
        )
        self._thread = Thread(target=self._run, name="observer")
        self._thread.start()

    @property
    def verdict(self) -> str:
        """The latest verdict."""
        return self.samples[-1].verdict if self.samples else UNREACHABLE

    def close(self) -> None:
        """End the looks."""
        self._closing.set()
        self._thread.join()
        self._client.close()
        if self._prometheus is not None:
            self._prometheus.close()

    def _run(self) -> None:
        while not self._closing.wait(POLL_S):
            state, unserved_s = self._state(), self._unserved_s()
            seen = state.get("verdict", UNREACHABLE), state["reason"], state.get("token_age_s")
            self.samples.append(Sample(time.monotonic(), *seen, unserved_s))

    def _state(self) -> dict[str, Any]:
        try:
            answer = self._client.get("/api/v1/state")
        except httpx.HTTPError as exc:
            return {"reason": type(exc).__name__}
        if answer.is_success:
            found: dict[str, Any] = answer.json()
            return found
        return {"reason": f"{answer.status_code} {answer.text[:200]}"}

    def _unserved_s(self) -> float | None:
        try:
            found = UNSERVED.search(self._client.get("/metrics").text)
        except httpx.HTTPError:
            return None
        return float(found[1]) if found else None

    def _alerts(self, begun: float, told_at: float | None) -> dict[str, Any]:
        """What Prometheus scraped and evaluated: alerts that a fault brought, and how soon."""
        if self._prometheus is None:
            return {"has_prometheus": False, "alert_s": None, "alert_scrapes": None, "alerts": []}
        ahead_s, since = time.time() - time.monotonic(), f"[{HISTORY_S}s]"
        targets = self._prometheus.query(f"up{since}")
        scrapes = [at - ahead_s for one in targets for at, _ in one["values"]]
        first, before = dict[str, float](), set[str]()
        for one in self._prometheus.query(f"ALERTS{since}"):
            name = " ".join(filter(None, map(one["metric"].get, ("alertname", "type"))))
            times = [at - ahead_s for at, _ in one["values"]]
            if name in OF_BALANCE or any(begun - BEFORE_S < at < begun for at in times):
                before.add(name)
            elif later := [at for at in times if at >= begun]:
                first[name] = min(later[0], first.get(name, later[0]))
        brought = {name: at for name, at in first.items() if name not in before}
        at, from_s = min(brought.values(), default=None), told_at or begun
        found: dict[str, Any] = {"has_prometheus": True, "alerts": sorted(brought)}
        if at is None:
            return found | {"alert_s": None, "alert_scrapes": None}
        num_scrapes = sum(from_s < one <= at for one in scrapes)
        return found | {"alert_s": round(at - from_s, 2), "alert_scrapes": num_scrapes}

    # -- what came of it

    def report(self, tokens: Sequence[float], begun: float, ended: float) -> dict[str, Any]:
        """Compare what was told with the tokens, from the first fault to the end of the case."""
        usual_s = max((b - a for a, b in gaps(tokens, begun - 5.0, begun, 0.0)), default=0.0)
        every = gaps(tokens, begun, ended, 0.0)
        stalls = [(a, b) for a, b in every if b - a > max(STALL_S, 2 * usual_s)]
        gone = [(a, b) for a, b in stalls if b - a > OUTAGE_S]
        during = [one for one in self.samples if begun <= one.time <= ended]
        earlier = [one for one in self.samples if one.time < begun]
        told_at = next((s.time for s in during if s.verdict != "serving"), None)
        ages = [
            abs(s.token_age_s - (s.time - start))
            for s in during
            for start, end in gone
            if s.token_age_s is not None and start + GRACE_S < s.time < end
        ]
        return {
            "outages": [[round(a - begun, 2), round(b - a, 2)] for a, b in gone],
            "longest_s": round(max((b - a for a, b in every), default=0.0), 2),
            "missing_s": round(sum(b - a for a, b in gone), 2),
            "short_s": round(sum(b - a for a, b in stalls if b - a <= OUTAGE_S), 2),
            "unserved_told_s": _grown([*earlier[-1:], *during]),
            "age_off_s": round(median(ages), 2) if ages else None,
            "told_s": None if told_at is None else round(told_at - begun, 2),
            "stop_told_s": [_stop_told(during, one) for one in gone],
            "false_stop_s": round(_false_stop_s(during, stalls), 2),
            **self._alerts(begun, told_at),
            "verdicts": _changes(during, begun),
        }


def _grown(samples: list[Sample]) -> float | None:
    """How much the counter of the metrics grew, over restarts of the service; None: no counter."""
    values = [one.unserved_s for one in samples if one.unserved_s is not None]
    grown = sum(b - a if b >= a else b for a, b in pairwise(values))
    return round(grown, 2) if values else None


def _stop_told(samples: list[Sample], outage: Span) -> float | None:
    """From the last token to the first verdict that tokens are missing; None: never."""
    bad = {"stopped", "blind", UNREACHABLE}
    found = (s.time - outage[0] for s in samples if s.verdict in bad)
    return next((round(at, 2) for at in found if 0 < at < outage[1] - outage[0] + GRACE_S), None)


def _false_stop_s(samples: list[Sample], gone: list[Span]) -> float:
    """For how long at most the verdict was stopped after tokens were served again."""
    longest_s = since_s = 0.0
    for a, b in pairwise(samples):
        is_false = a.verdict == "stopped" and not any(x <= a.time <= y for x, y in gone)
        since_s = since_s + b.time - a.time if is_false else 0.0
        longest_s = max(longest_s, since_s)
    return longest_s


def _changes(samples: list[Sample], begun: float) -> list[list[Any]]:
    """Verdicts with their first reasons, at the times at which they changed."""
    changes: list[list[Any]] = []
    for one in samples:
        if not changes or changes[-1][1] != one.verdict:
            changes.append([round(one.time - begun, 1), one.verdict, one.reason[:200]])
    return changes
