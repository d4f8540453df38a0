"""Whether a deployment is ready to be counted on, and if not, why: one sentence."""

from __future__ import annotations

from api.snapshot import Snapshot


def unready(seen: Snapshot, silent_after_s: float, stalled_after_s: float) -> str | None:
    """Say why a deployment is not ready, the worst first; None when it is.

    Args:
        seen: what the store holds.
        silent_after_s: how old a rank's last report may be, as ``seen`` was judged.
        stalled_after_s: for how long a rank's step or a thread at work may say nothing new.
    """
    if seen.run is None:
        return "no run has begun, expected one"
    if seen.silent_ranks:
        silent = ", ".join(map(str, seen.silent_ranks))
        return (
            f"silent ranks: {silent}, expected a report from all {len(seen.ranks)} "
            f"within {silent_after_s:g} s"
        )
    age_s = seen.progress_age_s
    if age_s is not None and age_s > stalled_after_s:
        return (
            f"no progress for {age_s:.1f} s, expected at most {stalled_after_s:g} s: "
            f"{seen.progress_of}"
        )
    frozen = next((view for view in seen.ranks if view.frozen), None)
    if frozen is not None:
        return f"rank {frozen.rank} takes part in no migration any more: {frozen.frozen}"
    return None
