"""The processes beside the ranks: controllers, host caches, launchers, services, by heartbeats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from api.monitor.state import Leadership, ProcessesState
from api.monitor.verdict import leadership
from api.processes.supervision import ProcessState, ProcessView, SupervisionView
from eplb.core.topology import Topology
from eplb.versions import CONTROLLER, HOST_CACHE, NAMES, SERVICE, Announcement
from telemetry.state.holder import is_dead, shown
from telemetry.state.joining import MISSED_BEATS, heartbeats, serving
from telemetry.state.store import StateStore

VERSIONS_S = 5.0  # after which the versions are read again: 5 ms with 320 ranks


class ProcessFold:
    """Follows the processes of a deployment. Its owner serialises calls."""

    def __init__(self) -> None:
        self.leadership = Leadership("", 0.0, "")
        self._beats: list[Announcement] = []
        self._versions: Mapping[str, str] = {}
        self._versions_at = -VERSIONS_S

    def read(self, store: StateStore, now: float) -> None:
        """Read who leads and which processes report.

        Raises:
            StoreError: the store cannot be read.
        """
        self.leadership = leadership(store, now)
        self._beats = sorted(heartbeats(store, now), key=lambda beat: (beat.component, beat.name))
        if 0 <= now - self._versions_at < VERSIONS_S:  # below 0: the clock was set back
            return
        self._versions_at = now
        versions = {process.component: process.version for process in serving(store, now)}
        caches = [beat for beat in self._beats if beat.component == HOST_CACHE]
        self._versions = versions | {f"{HOST_CACHE} {beat.name}": beat.version for beat in caches}

    def state(
        self,
        supervision: SupervisionView,
        topology: Topology | None,
        compiling: str,
        now: float,
        answered_s: float,
    ) -> ProcessesState:
        """Put together what is known of processes.

        Args:
            supervision: what the process that supervises others knows.
            topology: of the run, whose hosts count; None: no run has begun.
            compiling: that the leader compiles its kernels; "": it does not.
            now: seconds since the epoch.
            answered_s: for how long the store has answered again.
        """
        if topology is not None:
            hosts = {str(host) for host in topology.host_of_rank.tolist()}
            views = (
                _beat_view(beat, now, answered_s)
                for beat in self._beats
                if beat.name in hosts or beat.component in (CONTROLLER, SERVICE)
            )
            supervision = replace(supervision, processes=(*supervision.processes, *views))
        return ProcessesState(
            controller=replace(self.leadership, compiling=compiling),
            supervision=supervision,
            versions=self._versions,
        )


def _beat_view(announced: Announcement, now: float, answered_s: float) -> ProcessView:
    """Give a process by its heartbeat; whoever supervises it is not known here."""
    age_s = max(0.0, now - announced.time)
    has_exited = is_dead(announced.process)
    is_silent = has_exited or min(age_s, answered_s) > MISSED_BEATS * announced.every_s
    name, of = NAMES[announced.component], announced.name
    where = f"{name} of host {of}" if of.isdigit() else f"{name}, {shown(of)}"
    return ProcessView(
        name=where,
        kind=announced.component.replace(" ", "_"),
        state=ProcessState.DOWN if is_silent else ProcessState.RUNNING,
        report_age_s=age_s,
        is_late=is_silent,
        restarts=0,
        reason="",
        has_exited=has_exited,
    )
