"""A plan for the engine's map, made outside the engine's process: records in, records out.

The map has all rows of the engine, dense layers included: under the ``static`` rule the engine
draws replicas from one generator that runs through all rows, so that a plan for some rows alone
would book other draws than the engine makes.

Shapes:  T windows, L rows of the engine's map, E experts, S slots, R ranks, X entries of a list.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.problem import Budget
from eplb.core.topology import Topology
from eplb.decision.gate import CostModel, Decision
from eplb.dispatch_rules.plans import booked_and_effective
from eplb.dispatch_rules.rules import DispatchRule
from eplb.errors import PlacementError
from eplb.migration.serialisation import pack_record, unpack_record
from eplb.planner import plan

IntArray = NDArray[np.int64]

# ``lp`` solves for its own split in each batch, over the slots that a plan gives it.
RULES = {
    "static": DispatchRule.SGLANG_STATIC,
    "dynamic": DispatchRule.WEIGHTED,
    "lp": DispatchRule.EVEN,
    "fake": DispatchRule.EVEN,
}
REQUEST, ANSWER = "sglang-request", "sglang-plan"


@dataclass(frozen=True)
class Terms:
    """What a plan depends on beside load and map."""

    algorithm: str  # the engine's --ep-dispatch-algorithm
    num_ranks: int
    num_nodes: int
    num_groups: int  # the model's expert groups; 1: none
    expert_bytes: int
    list_length: int  # of the replica lists that weigh; 1: no uneven shares
    pay_back_s: float
    target_imbalance: float
    max_moved: float  # part of all slots


@dataclass(frozen=True, eq=False)
class Planned:
    """A map for all ranks, and what it is worth under the engine's rule."""

    slot_to_expert: IntArray  # [L, S]
    weights: IntArray  # [L, S] how often a slot stands in its expert's list
    moves: bool  # whether anything changes
    reason: str
    before: float
    after: float
    booked: float
    effective: float


def request_record(
    windows: IntArray, held: IntArray, movable: NDArray[np.bool_], terms: Terms
) -> bytes:
    """Pack a question: load [T, L, E], map [L, S], and which rows may change [L]."""
    arrays = {"windows": windows, "held": held, "movable": movable}
    return pack_record(REQUEST, asdict(terms), arrays)


def answer_record(planned: Planned) -> bytes:
    """Pack an answer; it has a digest."""
    fields = dict(vars(planned))
    arrays = {name: fields.pop(name).astype(np.int32) for name in ("slot_to_expert", "weights")}
    return pack_record(ANSWER, fields, arrays)


def answer_of(record: bytes) -> Planned:
    """Unpack an answer.

    Raises:
        StoreError: the record is damaged.
    """
    meta, arrays = unpack_record(ANSWER, record)
    fields: dict[str, Any] = {name: array.astype(np.int64) for name, array in arrays.items()}
    return Planned(**_fields(meta), **fields)


def answer(record: bytes) -> bytes:
    """Plan for a packed question."""
    meta, arrays = unpack_record(REQUEST, record)
    movable = arrays["movable"].astype(np.bool_)
    terms = Terms(**_fields(meta))
    return answer_record(make_plan(arrays["windows"], arrays["held"], movable, terms))


def _fields(meta: dict[str, Any]) -> dict[str, Any]:
    """A record's header without what describes the record."""
    return {name: value for name, value in meta.items() if name not in ("kind", "version")}


def make_plan(
    windows: IntArray, held: IntArray, movable: NDArray[np.bool_], terms: Terms
) -> Planned:
    """Plan for the rule by which the engine chooses among replicas.

    Raises:
        EplbError: load, map and ranks do not describe one system.
    """
    num_rows, num_slots = held.shape
    num_experts = windows.shape[2]
    each = num_slots // terms.num_ranks
    topology = Topology.uniform(terms.num_nodes, terms.num_ranks // terms.num_nodes, each)
    rule = RULES[terms.algorithm]
    used = windows[windows.any(axis=(1, 2))]  # a window without a pass has nothing to say
    current = Placement(held.astype(np.int32), num_experts)
    # An engine that moves weights blocks one pass for it: the gate weighs that against the gain.
    model = ModelShape(
        tuple(range(num_rows)), num_experts, 1, 1, 1, 0, terms.num_groups, terms.expert_bytes
    )
    made = plan(
        used,
        topology,
        model=model,
        current=current,
        budget=Budget(
            max_moves=int(terms.max_moved * held.size) if terms.max_moved < 1 else None,
            target_imbalance=1.0 if terms.max_moved >= 1 else terms.target_imbalance,
        ),
        cost=CostModel(pay_back_s=math.inf if terms.max_moved >= 1 else terms.pay_back_s),
        dispatch=rule,
    )
    target = made.target
    kept = np.where(movable[:, None], target.slot_to_expert, held)
    weights = np.ones(held.shape, dtype=np.int64)
    if rule is DispatchRule.WEIGHTED:
        weights = list_weights(kept, target.slot_share, num_experts, terms.list_length)
        target = Placement(kept.astype(np.int32), num_experts, 0, shares_of(kept, weights))
    else:
        target = Placement(kept.astype(np.int32), num_experts)
    booked, effective = booked_and_effective(made.problem, target)
    return Planned(
        slot_to_expert=kept.astype(np.int64),
        weights=weights,
        moves=made.decision is not Decision.KEEP,
        reason=made.reason,
        before=float(made.before),
        after=float(made.after),
        booked=booked,
        effective=effective,
    )


def shares_of(held: IntArray, weights: IntArray) -> NDArray[np.float64]:
    """[L, S] share of its expert's tokens that each slot gets from a list of these weights."""
    total = np.zeros((len(held), int(held.max()) + 1))
    rows = np.arange(len(held))[:, None]
    np.add.at(total, (rows, held), weights)
    share: NDArray[np.float64] = weights / total[rows, held]
    return share


def list_weights(
    held: IntArray, share: NDArray[np.float64], num_experts: int, length: int
) -> IntArray:
    """[L, S] whole numbers in proportion to the shares, by largest remainder.

    Each replica has at least 1. Those of an expert with replicas sum to ``length``, unless its
    split is even: then each has 1, the shortest list.
    """
    weights = np.ones(held.shape, dtype=np.int64)
    for row in range(len(held)):
        count = np.bincount(held[row], minlength=num_experts)
        for expert in np.flatnonzero((count > 1) & (count < length)):
            slots = np.flatnonzero(held[row] == expert)
            part = share[row, slots]
            if np.ptp(part) * length < 0.5:
                continue
            exact = part / part.sum() * (length - len(slots))
            found = 1 + np.floor(exact).astype(np.int64)
            rest = length - int(found.sum())
            # Stable, so that equal remainders go to the first slots on every machine.
            found[np.argsort(-(exact - np.floor(exact)), kind="stable")[:rest]] += 1
            weights[row, slots] = found
    return weights


def replica_lists(held: IntArray, weights: IntArray, num_experts: int) -> IntArray:
    """[L, E, X] slots of each expert in the order in which rows of a batch use them, then -1.

    A slot with weight w stands w times. Entries are spread, so that the first rows of a small batch
    are split as nearly by the weights as whole rows can be. X is at most the number of slots,
    because the engine's map has no room for more.

    Raises:
        PlacementError: an expert without a slot, or a list longer than the engine's map.
    """
    num_rows, num_slots = held.shape
    rows = np.arange(num_rows)[:, None]
    total = np.zeros((num_rows, num_experts), dtype=np.int64)
    np.add.at(total, (rows, held), weights)
    if not total.all():
        row, expert = np.argwhere(total == 0)[0]
        raise PlacementError(f"row {row}: expert {expert} has no slot, expected one or more")
    longest = int(total.max())
    if longest > num_slots:
        row, expert = np.argwhere(total == longest)[0]
        raise PlacementError(
            f"row {row}: the list of expert {expert} has {longest} entries, "
            f"expected {num_slots} at most: the engine's map is as wide as there are slots"
        )
    # The k-th of w entries of a slot stands at (k + 1/2) / w of the list.
    times = weights.reshape(-1)
    of_entry = np.repeat(np.arange(held.size), times)
    first = np.cumsum(times) - times
    at = (np.arange(len(of_entry)) - first[of_entry] + 0.5) / times[of_entry]
    list_of = (of_entry // num_slots) * num_experts + held.reshape(-1)[of_entry]
    slot = of_entry % num_slots
    order = np.lexsort((slot, -times[of_entry], at, list_of))
    begin = np.cumsum(total.reshape(-1)) - total.reshape(-1)
    place = np.arange(len(order)) - begin[list_of[order]]
    lists = np.full((num_rows * num_experts, longest), -1, dtype=np.int64)
    lists[list_of[order], place] = slot[order]
    return lists.reshape(num_rows, num_experts, longest)
