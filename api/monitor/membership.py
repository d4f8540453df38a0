"""Which ranks serve and which should, for every view: the page, ``eplb status``, an orchestrator.

operation   asked for once, with an id; it ends as done, failed or cancelled
phase       what stands between the ranks that serve and those that should, also after a death
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.declared import Meaning
from eplb.migration.membership import Phase, leavers, phase_of
from telemetry.state.live import LiveState
from telemetry.state.membership import MembershipChange

MOST_UNCOVERED = 1000  # experts


@dataclass(frozen=True)
class Membership:
    """Which ranks serve, which should, and what the change waits for."""

    epoch: Annotated[
        int, Meaning("number of the latest recorded group of ranks; 0 before the first")
    ]
    members: Annotated[tuple[int, ...], Meaning("ranks that serve")]
    wanted: Annotated[tuple[int, ...], Meaning("ranks that should serve")]
    phase: Annotated[
        Phase,
        Meaning(
            "settled: the wanted ranks serve; draining: experts leave ranks that are to leave; "
            "waiting: wanted ranks start; joining, leaving: the group changes next"
        ),
    ]
    waits: Annotated[str, Meaning("what the phase waits for; empty: nothing")]
    survivors: Annotated[tuple[int, ...], Meaning("ranks that serve now and should afterwards")]
    safe_to_delete: Annotated[
        tuple[int, ...], Meaning("ranks that neither serve nor should: their hosts may go")
    ]
    operation: Annotated[
        MembershipChange | None,
        Meaning("the latest operation, open or ended; null: there was none"),
    ]
    left_s: Annotated[
        float | None,
        Meaning(
            "time until the open operation fails; null: none is open, or it has no deadline",
            unit="s",
        ),
    ]


@dataclass(frozen=True)
class UncoveredExpert:
    """An expert that no rank would hold."""

    layer: Annotated[int, Meaning("the model's layer number")]
    expert: int


@dataclass(frozen=True)
class LossAnswer:
    """What the loss of ranks would leave, by the placement that ranks serve."""

    lost: list[int]
    is_feasible: Annotated[bool, Meaning("whether the other ranks have a slot for each expert")]
    spare_slots: Annotated[
        int,
        Meaning(
            "slots of the other ranks in each layer, beyond one for each expert; negative: so many "
            "experts of each layer would have none"
        ),
    ]
    uncovered: Annotated[
        int,
        Meaning(
            "experts of all layers that no other rank holds: no rank computes their tokens until "
            "their weights are read again"
        ),
    ]
    uncovered_experts: Annotated[
        list[UncoveredExpert], Meaning(f"by layer and expert, at most {MOST_UNCOVERED}")
    ]
    refills: Annotated[
        int, Meaning("experts that survivors load before they serve on; 0 where it is not feasible")
    ]
    refill_bytes: Annotated[int, Meaning("bytes of these", unit="bytes")]
    refill_s: Annotated[
        float,
        Meaning(
            "time until the rank with most of them has loaded them, at `planner.bytes_per_s`",
            unit="s",
        ),
    ]
    imbalance: Annotated[
        float | None,
        Meaning(
            "mean over layers once survivors serve on, by the latest load window; null: it is not "
            "feasible, or there is no window"
        ),
    ]


@dataclass(frozen=True)
class MembershipPlan:
    """What a change of the ranks that serve does, or has begun to do."""

    is_dry_run: bool
    refusal: Annotated[str, Meaning("why it cannot be done; empty: it can")]
    wanted: Annotated[tuple[int, ...], Meaning("ranks that serve afterwards")]
    joins: Annotated[list[int], Meaning("ranks that start and join")]
    retires: Annotated[list[int], Meaning("ranks that are drained and leave")]
    loss: Annotated[
        LossAnswer,
        Meaning(
            "what the leaving ranks alone hold; nothing is lost: `uncovered` experts are moved "
            "before they leave, which are the fewest moves that it takes"
        ),
    ]
    operation: Annotated[MembershipChange | None, Meaning("the operation; null: a dry run")]


def membership_of(
    topology: Topology,
    placement: Placement | None,
    change: MembershipChange | None,
    epoch: int,
    live: LiveState,
    ready: Collection[int],
    now: float,
) -> Membership:
    """Put together which ranks serve and should.

    Args:
        topology: of the run.
        placement: serves; None: none was committed yet.
        change: the latest operation.
        epoch: number of the latest recorded group.
        live: the live settings, which may keep experts from moving.
        ready: ranks that have proved themselves and wait to be admitted.
        now: seconds since the epoch, by the store's clock.
    """
    if placement is not None and placement.num_slots != topology.num_slots:
        placement = None  # the placement found was of another start's ranks
    everyone = range(topology.num_ranks)
    members = tuple(np.flatnonzero(topology.alive).tolist())
    wanted = tuple(everyone) if change is None else change.should_serve
    phase, waits = phase_of(wanted, placement, topology, ready)
    if phase == "draining" and (why := why_not_moved(live)):
        waits = f"{waits}; {why}"
    leaving = leavers(wanted, topology)
    return Membership(
        epoch=epoch,
        members=members,
        wanted=wanted,
        phase=phase,
        waits=waits,
        survivors=tuple(rank for rank in members if rank not in leaving),
        safe_to_delete=tuple(rank for rank in everyone if rank not in {*members, *wanted}),
        operation=change,
        left_s=None if change is None else change.left_s(now),
    )


def why_not_moved(live: LiveState) -> str:
    """Why draining ranks keep their experts now; "": plans move them."""
    if not live.control.movement:
        return "movement is off"
    if live.control.observe:
        return "observe is on"
    waits = {"observe": "the stage is observe", "propose": "the stage is propose: approve the plan"}
    return waits.get(live.text("stage"), "")
