"""The pace of the next migration, by what the one before it did to the time of the ranks' steps.

A migration has the part ``part`` of the deployment's own pace: of its transactions, of the experts
in each, and of the budget of each link. It is frozen in the migration: ranks that changed it by
themselves would swap different layers at the same step. One request may limit the pace further,
within that of the deployment.

    within the budget    + STEP, 1 at most
    above it             half, LEAST at least
    not in time          + STEP: a slower one would not end in time either
    not measured         as before
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated

from eplb.declared import Meaning
from eplb.errors import ConfigError
from eplb.migration.build import Pace

STEP = 1 / 8
LEAST = 1 / 16  # a link of 6 GB/s keeps 375 MB/s, and an expert of 44 MB takes 0.12 s
ENOUGH_BEFORE, ENOUGH_MOVING = 32, 8  # steps; the 95th percentile of fewer is their largest


@dataclass(frozen=True)
class StepTimes:
    """Times from one step of a rank to the next, around the latest migration that it staged.

    Before: the latest steps without a migration. Moving: those in which it staged or swapped. Times
    in ms: median and 95th percentile; 0 without a step.
    """

    plan_id: int = 0  # the migration's; 0: there was none since the rank's start
    steps_before: int = 0
    p50_before_ms: float = 0.0
    p95_before_ms: float = 0.0
    steps_moving: int = 0
    p50_moving_ms: float = 0.0
    p95_moving_ms: float = 0.0

    @property
    def slowdown(self) -> float | None:
        """By what part the slow steps were slower; None: there were too few steps to tell."""
        if self.steps_before < ENOUGH_BEFORE or self.steps_moving < ENOUGH_MOVING:
            return None
        return self.p95_moving_ms / self.p95_before_ms - 1 if self.p95_before_ms > 0 else None


@dataclass(frozen=True)
class PaceChange:
    """What a migration did to the steps, and the pace before and after it."""

    plan_id: Annotated[int, Meaning("plan id of the migration that was judged")]
    slowdown: Annotated[
        float | None,
        Meaning("part by which it lengthened the p95 of step time; null: not measured"),
    ]
    budget: Annotated[float, Meaning("`step_time_budget` at that time")]
    part_before: Annotated[float, Meaning("part of the deployment's own pace that it had")]
    part: Annotated[float, Meaning("part of that pace that the next migration has")]
    reason: str


def pace_now(budget: float, latest: PaceChange | None, *, is_measured: bool) -> tuple[float, str]:
    """Return the next migration's part of the deployment's own pace, and the reason.

    Args:
        budget: by what part the 95th percentile of step time may be longer; 0: any.
        latest: the latest judgement; None: there was none.
        is_measured: whether a rank reports times of its steps.
    """
    if not budget:
        return 1.0, "fixed: step_time_budget is 0"
    if not is_measured:
        return 1.0, "fixed: no rank reports times of its steps"
    if latest is None:
        return 1.0, "no migration was judged yet"
    return latest.part, latest.reason


def judged(
    plan_id: int,
    part: float,
    budget: float,
    ranks: Sequence[StepTimes],
    *,
    moves: bool = True,
    is_late: bool = False,
) -> PaceChange:
    """Judge a migration by its ranks' steps: the pace that it had, and that of the next one.

    The ranks serve in lock step, so that each measures the same slowdown: their median is taken.

    Args:
        plan_id: of the migration; times around another one are left out.
        part: of the deployment's own pace, that it had.
        budget: by what part the 95th percentile of step time may be longer.
        ranks: what each rank measured.
        moves: whether it moved any expert.
        is_late: whether it was withdrawn because it had not ended in time.
    """
    measured = [one.slowdown for one in ranks if moves and one.plan_id == plan_id]
    found = [one for one in measured if one is not None]
    slowdown = median(found) if found else None
    following = min(part + STEP, 1.0)
    if not moves:
        following, reason = part, f"plan {plan_id} was not judged: it moved no expert"
    elif is_late:
        reason = f"plan {plan_id} did not end in time"
    elif slowdown is None:
        following = part
        reason = (
            f"plan {plan_id} was not judged: no rank reports {ENOUGH_MOVING} steps in it and "
            f"{ENOUGH_BEFORE} before it"
        )
    else:
        reason = f"plan {plan_id} made the p95 of step time {slowdown:+.1%}, expected {budget:+.1%}"
        reason += " at most" if slowdown > budget else " or less"
        following = max(part / 2, LEAST) if slowdown > budget else following
    if following != part:
        reason += f": part {part:g} -> {following:g}"
    shown = None if slowdown is None else round(slowdown, 4)
    return PaceChange(plan_id, shown, budget, part, following, reason)


def paced(own: Pace, part: float, num_layers: int) -> Pace:
    """Return the part of a deployment's own pace; each figure keeps at least 1.

    Args:
        num_layers: MoE layers of the model.
    """
    if part >= 1:
        return own

    def of(figure: int) -> int:
        return max(1, int(figure * part))

    slower = replace(
        own,
        transactions_per_commit=of(own.transactions_per_commit),
        link_part=own.link_part * part,
    )
    if own.mode == "flip":
        return replace(slower, layers_per_transaction=of(own.layers_per_transaction or num_layers))
    room = own.experts_per_transaction or own.staging_experts // 2
    return replace(slower, experts_per_transaction=of(room))


@dataclass(frozen=True)
class Throttle:
    """How much slower than the deployment a migration is to go; None: as the deployment.

    Raises:
        ConfigError: a figure out of range.
    """

    experts_per_transaction: int | None = None  # experts that arrive on a rank; copy mode only
    layers_per_transaction: int | None = None
    link_part: float | None = None  # part of the budget of each of a rank's links

    def __post_init__(self) -> None:
        for name in ("experts_per_transaction", "layers_per_transaction"):
            found = getattr(self, name)
            if found is not None and found < 1:
                raise ConfigError(f"throttle: {name} is {found}, expected 1 or more")
        if self.link_part is not None and not 0 < self.link_part <= 1:
            raise ConfigError(
                f"throttle: link_part is {self.link_part}, expected more than 0 and at most 1"
            )

    def of(self, pace: Pace) -> Pace:
        """Return the slower of the two in each figure.

        Args:
            pace: the deployment's.

        Raises:
            ConfigError: a limit that its mode does not have.
        """
        if pace.mode != "copy" and self.experts_per_transaction is not None:
            raise ConfigError(
                f"throttle: experts_per_transaction is set in {pace.mode} mode, expected "
                "layers_per_transaction, which limits it there"
            )
        most = pace.experts_per_transaction or pace.staging_experts // 2
        return replace(
            pace,
            experts_per_transaction=_least(
                pace.experts_per_transaction, self.experts_per_transaction, most
            ),
            layers_per_transaction=_least(
                pace.layers_per_transaction, self.layers_per_transaction, 0
            ),
            link_part=min(pace.link_part, self.link_part or pace.link_part),
        )


def _least(own: int, asked: int | None, most: int) -> int:
    """Return the smaller; 0 of the deployment is its default, ``most``; 0 of that: no limit."""
    if asked is None:
        return own
    limit = own or most
    if limit and asked >= limit:
        return own
    return asked
