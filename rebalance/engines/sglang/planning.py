"""A plan for the engine's map, made in the process at the store: windows in, records out.

The map has all rows of the engine, dense layers included. Uneven shares are whole weights of slots:
``dynamic`` gets lists that repeat slots, and ``static``, where each source rank uses one replica,
gets the table of these choices (``sources``) in place of the engine's random draws.

Shapes:  T windows, L rows of the engine's map, E experts, S slots, R ranks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.cost import Decision
from eplb.core.dispatch import DispatchRule, effective_shares
from eplb.core.placement import Placement
from eplb.core.problem import Budget
from eplb.core.topology import Topology
from eplb.errors import PlacementError
from eplb.measure import imbalance
from eplb.migration.serialisation import pack_record, unpack_record
from eplb.planner import Plan
from rebalance.controller.plans.planning import summary
from rebalance.engines.common import planning as common
from rebalance.engines.common.messages import PassWindow
from rebalance.engines.common.planning import System
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.common.replica_weights import shares_of
from rebalance.engines.common.tap import IntArray
from rebalance.engines.sglang.replica_weights import (
    evened,
    list_weights,
    source_table,
    source_weights,
)

# ``lp`` solves for its own split in each batch, over the slots that a plan gives it.
RULES = {
    "static": DispatchRule.WEIGHTED,
    "dynamic": DispatchRule.WEIGHTED,
    "lp": DispatchRule.EVEN,
    "fake": DispatchRule.EVEN,
}
ANSWER = "sglang-plan"
PLAN_WINDOWS = 16
LIST_LENGTH = 64  # entries of a list with uneven shares: within 1 % of the planned ones
GOAL = 1.01  # imbalance of a row that a plan with free moves need not improve by swaps
ARRAYS = ("slot_to_expert", "weights", "sources")


@dataclass(frozen=True)
class Shape:
    """What stays the same while the engine runs."""

    system: System
    rank: int
    num_experts: int
    num_slots: int
    algorithm: str  # the engine's --ep-dispatch-algorithm
    rows: list[int]  # with routed experts

    @property
    def own(self) -> slice:
        """Slots of this rank."""
        each = self.num_slots // self.system.num_ranks
        return slice(self.rank * each, (self.rank + 1) * each)

    def movable(self, num_rows: int) -> NDArray[np.bool_]:
        """[L] which rows have routed experts."""
        return np.isin(np.arange(num_rows), self.rows)


@dataclass(frozen=True, eq=False)
class Planned:
    """A map for all ranks, and what it is worth under the engine's rule."""

    slot_to_expert: IntArray  # [L, S]
    weights: IntArray  # [L, S] how often a slot stands in its list, or how many ranks use it
    sources: IntArray  # [L, E, R] slot that each source rank uses under ``static``, else [L, E, 0]
    # As of a controller's plan, and the imbalance by the planned shares (``booked``) and by the
    # weights that stand for them (``effective``).
    figures: dict[str, Any]

    @property
    def moves(self) -> bool:
        """Whether anything does."""
        return bool(self.figures["decision"] != Decision.KEEP.value)


def terms_of(shape: Shape, settings: PluginSettings) -> dict[str, Any]:
    """What ``Planner`` takes, ready for JSON."""
    return {
        "shape": asdict(shape),
        "max_moved": settings.engine.max_moved,
        "pay_back_s": settings.planner.pay_back_s,
        "target_imbalance": settings[Budget].target_imbalance,
    }


def answer_record(planned: Planned) -> bytes:
    """Pack an answer; it has a digest."""
    fields = dict(vars(planned))
    arrays = {name: fields.pop(name).astype(np.int32) for name in ARRAYS}
    return pack_record(ANSWER, fields, arrays)


def answer_of(record: bytes) -> Planned:
    """Unpack an answer.

    Raises:
        StoreError: the record is damaged.
    """
    meta, arrays = unpack_record(ANSWER, record)
    fields: dict[str, Any] = {name: array.astype(np.int64) for name, array in arrays.items()}
    header = {name: value for name, value in meta.items() if name not in ("kind", "version")}
    return Planned(**header, **fields)


class Planner:
    """Plans on the latest windows, in the process at the store.

    Args:
        terms: as ``terms_of`` gives them.
    """

    def __init__(self, terms: dict[str, Any]) -> None:
        shape = terms["shape"]
        self._shape = Shape(**shape | {"system": System(**shape["system"])})
        self._limits = {name: value for name, value in terms.items() if name != "shape"}
        self._windows: deque[IntArray] = deque(maxlen=PLAN_WINDOWS)
        self._latest: PassWindow | None = None

    def add(self, window: PassWindow) -> None:
        """Take the latest window."""
        shape = len(window.held), self._shape.num_experts
        tokens = np.zeros(shape, dtype=np.int64)
        np.add.at(tokens, (np.arange(len(tokens))[:, None], window.held), window.tokens)
        self._windows.append(tokens)
        self._latest = window

    def plan(self) -> tuple[bytes, dict[str, Any]] | None:
        """The packed plan, b"" if it moves nothing, and its figures; None without a window."""
        if self._latest is None:
            return None
        held, weights, limits = self._latest.held, self._latest.weights, self._limits
        if not weights.any():  # no plan has made the map yet: any number of experts may move
            limits = limits | {"max_moved": 1.0}
        planned = make_plan(np.stack(self._windows), held, weights, self._shape, **limits)
        return answer_record(planned) if planned.moves else b"", planned.figures


def make_plan(
    windows: IntArray,
    held: IntArray,
    serving: IntArray,
    shape: Shape,
    *,
    max_moved: float,
    pay_back_s: float,
    target_imbalance: float,
) -> Planned:
    """Plan for the rule by which the engine chooses among replicas.

    Args:
        windows: [T, L, E] tokens.
        held: [L, S] the map that serves.
        serving: [L, S] its weights; 0 while the engine's own choices serve.
        shape: of model and ranks.
        max_moved: part of all slots; 1: any number, for any gain.
        pay_back_s: as ``common.planning.planned``.
        target_imbalance: the same.

    Raises:
        EplbError: load, map and ranks do not describe one system.
    """
    is_free, rule = max_moved >= 1, RULES[shape.algorithm]
    movable = shape.movable(len(held))
    topology = shape.system.topology(held.shape[1])
    made = common.planned(
        windows[windows.any(axis=(1, 2))],  # a window without a pass has nothing to say
        _serving(held, serving, shape, topology),
        shape.system,
        rule,
        max_moved=None if is_free else max_moved,
        pay_back_s=pay_back_s,
        target_imbalance=1.0 if is_free else target_imbalance,
    )
    wanted = np.where(movable[:, None], made.target.slot_to_expert, held).astype(np.int64)
    share = np.where(movable[:, None], made.target.slot_share, 1.0)
    kept, weights = wanted, np.ones(held.shape, dtype=np.int64)
    sources = np.zeros((len(held), shape.num_experts, 0), dtype=np.int64)
    if rule is DispatchRule.WEIGHTED:
        is_table = shape.algorithm == "static"
        weights = (
            source_weights(wanted, share, topology.num_ranks)
            if is_table
            else list_weights(wanted, share, min(LIST_LENGTH, shape.num_slots))
        )
        kept, weights = evened(
            wanted,
            weights,
            made.problem.mean_scaled * movable[:, None],  # others are swapped for nothing
            topology.node_of_slot.astype(np.int64) * (shape.system.num_groups > 1),
            each=held.shape[1] // topology.num_ranks,
            goal=GOAL if is_free else target_imbalance,
            most_swaps=_moves_left(made) // 2,
        )
        if is_table:
            sources = source_table(kept, weights, shape.num_experts, topology)
    booked, effective = (
        float(
            made.problem.mean_over_windows(imbalance(made.problem.work, placement, topology))[
                movable
            ].mean()
        )
        for placement in (
            Placement(wanted.astype(np.int32), shape.num_experts, 0, shares_of(wanted, share)),
            Placement(kept.astype(np.int32), shape.num_experts, 0, shares_of(kept, weights)),
        )
    )
    moves = 0 if made.decision is Decision.KEEP else int((kept != held).sum())
    return Planned(
        slot_to_expert=kept,
        weights=weights,
        sources=sources,
        figures=summary(made)
        | {
            "moves": moves,
            "bytes": moves * made.expert_bytes,
            "booked": round(booked, 4),
            "effective": round(effective, 4),
        },
    )


def _serving(held: IntArray, weights: IntArray, shape: Shape, topology: Topology) -> Placement:
    """The map that serves, with the shares by which it is dispatched."""
    placement = Placement(held.astype(np.int32), shape.num_experts)
    if weights.any():
        share = shares_of(held, weights)
    elif shape.algorithm == "static":
        share = effective_shares(placement, topology, DispatchRule.SGLANG_STATIC).clip(0.0, 1.0)
    else:
        return placement
    return Placement(placement.slot_to_expert, placement.num_experts, 0, share)


def _moves_left(made: Plan) -> int:
    """Moves that a plan that moves weights may still add."""
    limit = made.problem.max_moves
    if made.decision is not Decision.MOVE:
        return 0
    return made.target.slot_to_expert.size if limit is None else max(limit - len(made.moves), 0)


def check_plan(planned: Planned, held: IntArray, shape: Shape) -> None:
    """Refuse a plan that the engine's map cannot take; each rank checks the same bytes.

    Raises:
        PlacementError: a map of another shape or without an expert; a row without routed experts
            that changes; or a source rank that would use another expert.
    """
    found, num_experts = planned.slot_to_expert, shape.num_experts
    if found.shape != held.shape:
        raise PlacementError(f"the plan has shape {found.shape}, expected {held.shape}")
    Placement(found.astype(np.int32), num_experts)
    strays = np.flatnonzero((found != held).any(axis=1) & ~shape.movable(len(held)))
    if strays.size:
        raise PlacementError(f"row {strays[0]} has no routed experts, expected it unchanged")
    rows, experts = np.arange(len(held))[:, None, None], np.arange(num_experts)[:, None]
    wrong = np.argwhere(found[rows, planned.sources] != experts)
    for row, expert, rank in wrong[:1]:
        raise PlacementError(
            f"row {row}: rank {rank} would use slot {planned.sources[row, expert, rank]} for "
            f"expert {expert}, expected a slot that holds it"
        )
