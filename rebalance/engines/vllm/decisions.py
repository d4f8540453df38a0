"""A plan for vLLM's policy, and what was decided last, with uneven shares as lists of replicas.

vLLM's router chooses entry ``(row * 2654435769 mod 2**32) mod count`` of an expert's list of
physical ids. An id that stands in the list k times gets k / count of the rows. With a count that is
a power of two, consecutive rows visit every entry once before any entry again, because the
multiplier is odd. The ids are ordered so that every prefix of the rows is close to the shares too,
which matters for batches of fewer rows than entries.

vLLM passes the map alone from its policy to the commit, one layer at a time in its asynchronous
mode. The shares of the decided map are kept with the model and found again by the layer's row: a
row that is not the decided one, for whatever reason, gets vLLM's own even lists.

Shapes:  L MoE layers, E experts, S slots (physical experts), k lists of a layer, W entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import eplb
from eplb.core.problem import Budget
from rebalance.engines.common import planning as common
from rebalance.engines.common.planning import System
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.common.replica_weights import list_weights, shares_of, spread_lists
from rebalance.engines.common.tap import IntArray

if TYPE_CHECKING:
    from rebalance.engines.vllm.mover import TransferCheck

# The factor of the router's hash; ``guards`` compares it with the engine's source.
MULTIPLIER = 2654435769
WORD = 2**32
EQUAL = 2e-3  # shares that differ by less, relative to their mean, are equal
ENTRIES = 256  # entries of a list: an error of 0.2 % at most over 4,096 rows
# vLLM reports a stall of 0.91 s for a rebalance of 58 layers on 32 GPUs (pull request 43219), in
# which each rank receives about 22 GB.
BYTES_PER_S = 24e9


def planned(
    load: IntArray,
    serving: IntArray,
    system: System,
    settings: PluginSettings,
    *,
    is_first: bool,
) -> eplb.Plan:
    """Plan for one call of vLLM's policy.

    Args:
        load: [L, E] tokens of the window, of all ranks.
        serving: [2, L, P] the map that serves, and its repetitions; 0: vLLM's own even list.
        system: ranks and model.
        settings: limits of the plan.
        is_first: the map is not from a plan, so any number of experts may move.

    Raises:
        EplbError: no plan can be made.
    """
    engine, (held, repeats) = settings.engine, serving
    return common.planned(
        load,
        eplb.Placement(held.astype(np.int32), load.shape[1], 1, shares_by(held, repeats)),
        system,
        eplb.DispatchRule.WEIGHTED if engine.shares else eplb.DispatchRule.EVEN,
        max_moved=None if is_first else engine.max_moved,
        pay_back_s=settings.planner.pay_back_s,
        target_imbalance=settings[Budget].target_imbalance,
        time_ms=engine.plan_time_ms,
        bytes_per_s=BYTES_PER_S,
        # Any number may move at first: a search for few moves would take three times as long.
        policy="fresh" if is_first else "auto",
    )


def repetitions(held: IntArray, share: NDArray[np.float64], num_entries: int = ENTRIES) -> IntArray:
    """[L, S] how often each slot stands in the list of its expert; 0: vLLM's own list.

    The figures of an expert sum to ``num_entries``. An expert with one replica needs no list, and
    neither has one with equal shares among a power of two of replicas: vLLM's own list is exact.

    Args:
        held: [L, S] expert of each slot, -1 for an empty one.
        share: [L, S] part of its expert's tokens; sums to 1 over the replicas of an expert.
        num_entries: a power of two.
    """

    def needs_list(
        count: IntArray, most: NDArray[np.float64], least: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        is_uneven = np.maximum(most * count - 1, 1 - least * count) >= EQUAL
        return (count > 1) & (is_uneven | (count & (count - 1) > 0))

    return list_weights(held, share, num_entries, needs_list, plain=0)


def shares_by(held: IntArray, repeats: IntArray) -> NDArray[np.float64]:
    """[L, S] the part of its expert's rows that each slot gets, by ``repetitions`` [L, S]."""
    return shares_of(held, np.maximum(repeats, 1))


def chosen_entries(num_rows: int, num_entries: int) -> IntArray:
    """The entry of a list that the router looks up for each of the first rows."""
    rows = np.arange(num_rows, dtype=np.uint64)
    return (rows * MULTIPLIER % WORD % num_entries).astype(np.int64)


@dataclass(frozen=True, eq=False)
class MapDecision:
    """A map for all layers, and how often each slot stands in the list of its expert.

    The lists are made here, on the policy's thread, and not at a commit between two passes.
    """

    held: IntArray  # [L, S] the map that it asks for
    repeats: IntArray  # [L, S]; 0: vLLM's own list
    num_experts: int
    is_planned: bool = True  # whether a plan has made the map; False: it is that of the start
    _lists: tuple[IntArray, IntArray, IntArray] = field(init=False)

    def __post_init__(self) -> None:
        none = np.zeros(0, dtype=np.int64)
        layers, experts, spread = next(
            spread_lists(self.held, self.repeats), (none, none, np.zeros((0, 1), dtype=np.int64))
        )
        # The entry for a row is placed where the router looks for that row.
        num_entries = spread.shape[1]
        entries = spread[:, np.argsort(chosen_entries(num_entries, num_entries))]
        object.__setattr__(self, "_lists", (layers, experts, entries))

    def lists_of(self, layer: int) -> tuple[IntArray, IntArray]:
        """[k] experts of a layer that need a list, and [k, W] their lists of physical ids."""
        layers, experts, entries = self._lists
        return experts[layers == layer], entries[layers == layer]


@dataclass(eq=False)
class ServedMap:
    """The map of one model, as the last commits left it, and what was decided last for it.

    The decision is written by the policy's thread, and read by the step. A layer may serve another
    row than the decided one: what serves is ``held`` and ``repeats``.
    """

    model_state: Any
    held: IntArray  # [L, S]
    repeats: IntArray  # [L, S]
    latest: MapDecision | None = None
    check: TransferCheck | None = None  # of what vLLM moves; on all ranks, or on none
    is_planned: bool = False  # whether a plan has made the map; False: it is that of the start
    start: IntArray = field(init=False)  # [L, S] the map of the start, by which vLLM loads

    def __post_init__(self) -> None:
        self.start = self.held.copy()

    @property
    def model(self) -> Any:
        """vLLM's model."""
        return self.model_state.model

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.model.num_logical_experts)

    @property
    def serving(self) -> IntArray:
        """[2, L, S] a copy of the map that serves, and of its repetitions."""
        return np.stack([self.held, self.repeats])

    def decision_of_layer(self, row: IntArray, layer: int) -> MapDecision | None:
        """Return the latest decision, if it asks for this row [S] of a layer."""
        latest = self.latest
        return latest if latest is not None and np.array_equal(latest.held[layer], row) else None


def next_served(
    served: Sequence[ServedMap], held: IntArray, last: ServedMap | None
) -> ServedMap | None:
    """The model that vLLM asks its policy for with a map [L, S]; None: of no model.

    vLLM asks for its models in the order in which they were added, and then for the first again.
    Models of one shape have equal maps at their start, so the map alone does not tell them apart.

    Args:
        served: models, in that order.
        held: the map that serves.
        last: the model that was asked for last.
    """
    begin = 0 if last is None else served.index(last) + 1
    in_turn = [*served[begin:], *served[:begin]]
    return next((one for one in in_turn if np.array_equal(one.held, held)), None)
