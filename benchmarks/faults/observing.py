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

from benchmarks.faults.two_host_deployment import TwoHostDeployment
from benchmarks.operating.prometheus_server import PROMETHEUS, Prometheus

POLL_S = 0.2
UNREACHABLE = "unreachable"  # no answer of the service: Prometheus has EplbTargetLost for that
OUTAGE_S = 1.0  # without a token; a step comes every 0.05 s, and later where cores are busy
GRACE_S = 2.0
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
    alerts: frozenset[str]


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
            state, unserved_s, alerts = self._state(), self._unserved_s(), self._alerts()
            seen = state.get("verdict", UNREACHABLE), state["reason"], state.get("token_age_s")
            self.samples.append(Sample(time.monotonic(), *seen, unserved_s, alerts))

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

    def _alerts(self) -> frozenset[str]:
        try:
            found = self._prometheus.alerts() if self._prometheus else ()
            return frozenset(found) - OF_BALANCE
        except OSError:  # it starts
            return frozenset()

    # -- what came of it

    def report(self, tokens: Sequence[float], begun: float, ended: float) -> dict[str, Any]:
        """Compare what was told with the tokens, from the first fault to the end of the case."""
        usual_s = max((b - a for a, b in gaps(tokens, begun - 5.0, begun, 0.0)), default=0.0)
        every = gaps(tokens, begun, ended, 0.0)
        gone = [(a, b) for a, b in every if b - a > max(OUTAGE_S, 2 * usual_s)]
        during = [one for one in self.samples if begun <= one.time <= ended]
        told_at = next((s.time for s in during if s.verdict != "serving"), None)
        before = next((s.alerts for s in reversed(self.samples) if s.time < begun), frozenset())
        alerts = [(s.time, s.alerts - before) for s in during if s.alerts - before]
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
            "unserved_told_s": _grown(during),
            "age_off_s": round(median(ages), 2) if ages else None,
            "told_s": None if told_at is None else round(told_at - begun, 2),
            "stop_told_s": [_stop_told(during, one) for one in gone],
            "false_stop_s": round(_false_stop_s(during, gone), 2),
            "alert_s": round(alerts[0][0] - (told_at or begun), 2) if alerts else None,
            "alerts": sorted({name for _, names in alerts for name in names}),
            "has_prometheus": self._prometheus is not None,
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
    """For how long the verdict was stopped while tokens were served."""
    return sum(
        b.time - a.time
        for a, b in pairwise(samples)
        if a.verdict == "stopped" and not any(x <= a.time <= y + GRACE_S for x, y in gone)
    )


def _changes(samples: list[Sample], begun: float) -> list[list[Any]]:
    """Verdicts with their first reasons, at the times at which they changed."""
    changes: list[list[Any]] = []
    for one in samples:
        if not changes or changes[-1][1] != one.verdict:
            changes.append([round(one.time - begun, 1), one.verdict, one.reason[:200]])
    return changes
