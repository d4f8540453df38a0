"""A plan for the engine's map, made in the process at the store: windows in, records out.

The map has all rows of the engine, dense layers included. Uneven shares are whole weights of slots:
``dynamic`` gets lists that repeat slots, and ``static``, where each source rank uses one replica,
gets the table of these choices (``sources``) in place of the engine's random draws.

Shapes:  T windows, L rows of the engine's map, E experts, S slots, R ranks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.cost import Decision
from eplb.core.dispatch import DispatchRule, effective_shares
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import PlacementError
from eplb.measure.balance import imbalance
from eplb.migration.serialisation import pack_record, unpack_record
from eplb.planner import Plan
from rebalance.engines.common import planning as common
from rebalance.engines.common.messages import Window
from rebalance.engines.common.planning import Limits, System
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.common.replica_weights import shares_of
from rebalance.engines.common.tap import IntArray
from rebalance.engines.sglang.replica_weights import (
    evened,
    list_weights,
    source_table,
)
from rebalance.engines.sglang.tap import Shape

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
FIGURES = ("moves", "reason", "before", "after", "booked", "effective")  # for display


@dataclass(frozen=True)
class Terms:
    """What a plan depends on beside load and map."""

    algorithm: str  # the engine's --ep-dispatch-algorithm
    system: System
    num_experts: int
    list_length: int  # of the lists of ``dynamic`` that weigh; 1: no uneven shares
    pay_back_s: float
    target_imbalance: float
    max_moved: float  # part of all slots


@dataclass(frozen=True, eq=False)
class Planned:
    """A map for all ranks, and what it is worth under the engine's rule."""

    slot_to_expert: IntArray  # [L, S]
    weights: IntArray  # [L, S] how often a slot stands in its list, or how many ranks use it
    sources: IntArray  # [L, E, R] slot that each source rank uses under ``static``, else [L, E, 0]
    moves: bool  # whether anything changes
    reason: str
    before: float
    after: float
    booked: float  # by the planned shares
    effective: float  # by the weights that stand for them


@dataclass(frozen=True, eq=False)
class Observed:
    """Load, and the map that serves."""

    windows: IntArray  # [T, L, E]
    held: IntArray  # [L, S]
    weights: IntArray  # [L, S] of the map that serves; 0 while the engine's own choices serve
    movable: NDArray[np.bool_]  # [L] rows that may change


def terms_of(shape: Shape, settings: PluginSettings) -> dict[str, Any]:
    """What ``Planner`` takes, ready for JSON."""
    terms = Terms(
        algorithm=shape.algorithm,
        system=shape.system,
        num_experts=shape.num_experts,
        list_length=min(LIST_LENGTH, shape.num_slots),
        pay_back_s=settings.cost.pay_back_s,
        target_imbalance=settings.budget.target_imbalance,
        max_moved=settings.engine.max_moved,
    )
    return asdict(terms) | {"movable": shape.movable.tolist()}


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
    """Plans on the latest windows, as ``store_link.Planner``.

    Args:
        terms: fields of ``Terms``, and ``movable``: [L] rows that may change.
    """

    def __init__(self, terms: dict[str, Any]) -> None:
        fields = terms | {"system": System(**terms["system"])}
        self._movable = np.array(fields.pop("movable"), dtype=np.bool_)
        self._terms = Terms(**fields)
        self._windows: deque[IntArray] = deque(maxlen=PLAN_WINDOWS)
        self._latest: Window | None = None

    def add(self, window: Window) -> None:
        """Take the latest window."""
        shape = len(window.held), self._terms.num_experts
        tokens = np.zeros(shape, dtype=np.int64)
        np.add.at(tokens, (np.arange(len(tokens))[:, None], window.held), window.tokens)
        self._windows.append(tokens)
        self._latest = window

    def plan(self) -> tuple[bytes, dict[str, Any]] | None:
        """The packed plan, b"" if it moves nothing, and its figures; None without a window."""
        if self._latest is None:
            return None
        held, weights, terms = self._latest.held, self._latest.weights, self._terms
        if not weights.any():  # no plan has made the map yet: any number of experts may move
            terms = replace(terms, max_moved=1.0)
        planned = make_plan(Observed(np.stack(self._windows), held, weights, self._movable), terms)
        figures = {name: getattr(planned, name) for name in FIGURES}
        return answer_record(planned) if planned.moves else b"", figures


def make_plan(observed: Observed, terms: Terms) -> Planned:
    """Plan for the rule by which the engine chooses among replicas.

    Raises:
        EplbError: load, map and ranks do not describe one system.
    """
    held, windows = observed.held, observed.windows
    num_rows, num_experts = len(held), windows.shape[2]
    is_free = terms.max_moved >= 1
    target = 1.0 if is_free else terms.target_imbalance
    topology = terms.system.topology(held.shape[1])
    made = common.planned(
        windows[windows.any(axis=(1, 2))],  # a window without a pass has nothing to say
        _serving(observed, topology, terms),
        terms.system,
        Limits(terms.pay_back_s, target, terms.max_moved, is_free),
        RULES[terms.algorithm],
    )
    wanted = np.where(observed.movable[:, None], made.target.slot_to_expert, held).astype(np.int64)
    share = np.where(observed.movable[:, None], made.target.slot_share, 1.0)
    kept, weights = wanted, np.ones(held.shape, dtype=np.int64)
    sources = np.zeros((num_rows, num_experts, 0), dtype=np.int64)
    if RULES[terms.algorithm] is DispatchRule.WEIGHTED:
        is_table = terms.algorithm == "static"
        length = topology.num_ranks if is_table else terms.list_length
        weights = list_weights(wanted, share, length, is_full=is_table)
        kept, weights = evened(
            wanted,
            weights,
            made.problem.scaled.mean(axis=1),
            topology.node_of_slot.astype(np.int64) * (terms.system.num_groups > 1),
            each=held.shape[1] // topology.num_ranks,
            goal=GOAL if is_free else terms.target_imbalance,
            most_swaps=_moves_left(made) // 2,
        )
        if is_table:
            sources = source_table(kept, weights, num_experts, topology)
    booked, effective = (
        float(imbalance(made.problem.work, placement, topology)[..., observed.movable].mean())
        for placement in (
            Placement(wanted.astype(np.int32), num_experts, 0, _whole(wanted, share)),
            Placement(kept.astype(np.int32), num_experts, 0, shares_of(kept, weights)),
        )
    )
    return Planned(
        slot_to_expert=kept,
        weights=weights,
        sources=sources,
        moves=made.decision is not Decision.KEEP,
        reason=made.reason,
        before=float(made.before),
        after=float(made.after),
        booked=booked,
        effective=effective,
    )


def _serving(observed: Observed, topology: Topology, terms: Terms) -> Placement:
    """The map that serves, with the shares by which it is dispatched."""
    placement = Placement(observed.held.astype(np.int32), observed.windows.shape[2])
    if observed.weights.any():
        share = shares_of(observed.held, observed.weights)
    elif terms.algorithm == "static":
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


def _whole(held: IntArray, share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shares that sum to 1 for each expert, those of rows without a plan too."""
    total = np.zeros((len(held), int(held.max()) + 1))
    rows = np.arange(len(held))[:, None]
    np.add.at(total, (rows, held), share)
    normal: NDArray[np.float64] = share / total[rows, held]
    return normal


def check_plan(planned: Planned, held: IntArray, shape: Shape) -> None:
    """Refuse a plan that the engine's map cannot take; each rank checks the same bytes.

    Raises:
        PlacementError: as ``common.planning.check_target``; or weights or choices of source ranks
            that do not fit the map.
    """
    found = planned.slot_to_expert
    common.check_target(found, held, shape.num_experts, shape.movable)
    if planned.weights.shape != held.shape:
        raise PlacementError(f"weights have shape {planned.weights.shape}, expected {held.shape}")
    if planned.weights.min() < 1:
        raise PlacementError(f"a slot has weight {planned.weights.min()}, expected 1 or more")
    sources, num_ranks = (
        planned.sources,
        shape.system.num_ranks if shape.algorithm == "static" else 0,
    )
    if sources.shape != (len(held), shape.num_experts, num_ranks):
        raise PlacementError(
            f"the plan has choices of source ranks of shape {sources.shape}, "
            f"expected {(len(held), shape.num_experts, num_ranks)}"
        )
    is_slot = (sources >= 0) & (sources < held.shape[1])
    rows, experts = np.arange(len(held))[:, None, None], np.arange(shape.num_experts)[:, None]
    wrong = ~is_slot | (found[rows, np.where(is_slot, sources, 0)] != experts)
    for row, expert, rank in np.argwhere(wrong)[:1]:
        raise PlacementError(
            f"row {row}: rank {rank} would use slot {sources[row, expert, rank]} for expert "
            f"{expert}, expected a slot that holds it"
        )
