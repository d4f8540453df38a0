"""Whether a deployment is ready, and if not, the reason in one sentence."""

from __future__ import annotations

from api.monitor.snapshot import Snapshot
from api.processes.supervision import ProcessState


def leaderless(why_none: str, turn_age_s: float | None, stalled_after_s: float) -> str | None:
    """Return why a deployment without a leader is not ready, once the last turn is too old.

    A deployment that never had a controller serves without one.
    """
    if not why_none or turn_age_s is None or turn_age_s <= stalled_after_s:
        return None
    return f"{why_none}; the last turn of one is {turn_age_s:.0f} s old"


def unready(seen: Snapshot, stalled_after_s: float) -> str | None:
    """Return why a deployment is not ready, the worst first; None when it is.

    Args:
        seen: what the store holds.
        stalled_after_s: for how long a rank's step or a busy thread may make no progress.
    """
    if seen.run is None:
        return "no run has begun, expected one"
    if seen.silent_ranks:
        silent = ", ".join(map(str, seen.silent_ranks))
        limit_s = max(view.silent_after_s for view in seen.ranks if not view.is_alive)
        return (
            f"silent ranks: {silent}, expected a report from all {len(seen.ranks)} "
            f"within {limit_s:g} s; a clock that is behind looks the same (eplb check)"
        )
    age_s = seen.progress_age_s
    if age_s is not None and age_s > stalled_after_s:
        return (
            f"no progress for {age_s:.1f} s, expected at most {stalled_after_s:g} s: "
            f"{seen.progress_of}"
        )
    down = [one for one in seen.supervision.processes if one.state is ProcessState.DEGRADED]
    if down:
        return f"{down[0].name} is down, its restart budget is used up: {down[0].reason}"
    late = next((view for view in seen.supervision.processes if view.is_late), None)
    if late is not None:
        return (
            f"no report from {late.name} for {late.report_age_s:.1f} s: it hangs or is not running"
        )
    lease_age_s = seen.supervision.lease_age_s
    if lease_age_s is not None and lease_age_s > stalled_after_s:
        return (
            f"no controller has renewed its lease for {lease_age_s:.1f} s, "
            f"expected within {stalled_after_s:g} s"
        )
    frozen = next((view for view in seen.ranks if view.frozen), None)
    if frozen is not None:
        return f"rank {frozen.rank} has migrations disabled: {frozen.frozen}"
    return None
