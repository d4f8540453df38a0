"""A rank's report to the store: progress, counters, versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rebalance.rank.core import RankCore
from rebalance.stage.figures import StageFigures
from telemetry.state.runs import BATCH_FAULTS, STEP_TIMES, RankState

REPORTED_PAUSES = 256  # of the latest swaps


def rank_state(core: RankCore, notes: Mapping[str, Any]) -> RankState:
    """Return a rank's report; ``notes`` are fields that the engine adds."""
    swapper = core.swapper
    with core.shared.changed:
        state = core.shared.state
        share = swapper.share if state.plan is not None else None
    to_stage = sum(map(len, share.moves)) if share is not None else 0
    stage, oldest = core.mover.figures(), core.watchdog.oldest()
    return RankState(
        run=core.settings.run,
        rank=core.slots.rank,
        time=core.links.clock(),
        step=max(core.steps.last, 0),
        generation=state.generation,
        phase=state.phase.value,
        plan_id=state.plan.plan_id if state.plan else 0,
        applied=state.applied,
        sequence=core.sampler.num_cut,
        weights_version=core.fence.version,
        prepared=state.prepared,
        frozen=state.frozen_reason,
        digest_failures=stage.num_wrong_digests + core.scrubber.num_digest_failures,
        mover_failures=core.watcher.num_mover_failures,
        progress_age_s=round(oldest.age_s, 3),
        progress_of=str(oldest),
        detail={"to_stage": to_stage} | _measured(core, stage) | dict(notes),
    )


def _measured(core: RankCore, stage: StageFigures) -> dict[str, Any]:
    swapper, scrubber = core.swapper, core.scrubber
    return {
        "bytes_by_source": dict(stage.bytes_by_source),
        BATCH_FAULTS: dict(core.sampler.faults.counts),
        "experts_moved": swapper.figures.experts_moved,
        "rebalances": swapper.figures.rebalances,
        "staged": stage.num_staged,
        "stage": stage.as_detail(),
        STEP_TIMES: vars(core.step_timer.figures()),
        "swap_pauses_ms": swapper.figures.swap_pauses_ms[-REPORTED_PAUSES:],
        "scrubbed": dict(scrubber.counts),
        "sweeps": scrubber.num_sweeps,
    }
