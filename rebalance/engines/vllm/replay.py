"""Replays a trace of load as the routing of a live vLLM, by its ``RoutingSimulator``.

    EPLB_REPLAY=load.pt VLLM_MOE_ROUTING_SIMULATION_STRATEGY=eplb_trace vllm serve ...

The model's answers mean nothing then; loads, moves and times of the balancer are real. A trace is
any load that ``eplb plan`` reads. Each of its windows serves for ``EPLB_REPLAY_PASSES`` passes, and
the last is followed by the first.

A row takes k experts whose chances are k times the parts of the window: systematic sampling gives
these chances exactly, and no expert twice. The start of a row is a low-discrepancy sequence, so the
loads of a pass differ from the window by a few tokens. All of it is computed from tensors with
fixed addresses, without a random generator and without waiting for the device: each replay of a
CUDA graph is another pass. Which experts are chosen together is not that of the trace.

Shapes:  T windows, L MoE layers, E experts, B rows of a pass, k experts of a row.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.core.load import LoadHistory
from eplb.errors import ConfigError, HistoryError
from rebalance.engines.common.guards import require
from rebalance.engines.vllm.assumptions import REPLAY

STRATEGY = "eplb_trace"
STRATEGY_VARIABLE = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
TRACE_VARIABLE, PASSES_VARIABLE = "EPLB_REPLAY", "EPLB_REPLAY_PASSES"
PASSES = 64
# Irrational steps of the start of a row, from row to row and from pass to pass.
ROW_STEP, PASS_STEP = 0.6180339887498949, 0.7548776662466927
MOST_CHANCE = 1.0 - 1e-9  # of an expert: with 1, rounding could give it to a row twice

log = logging.getLogger(__name__)


def register_replay(environ: Mapping[str, str]) -> None:
    """Register the strategy with vLLM's simulator; a layer of the model gets a layer of the trace.

    Raises:
        ConfigError: no trace is named, or a number is wrong.
        HistoryError: the trace cannot be read or replayed.
    """
    # Late: processes that replay nothing need neither readers nor vLLM's routers.
    from telemetry.formats.table import read_load
    from telemetry.formats.types import ReadOptions

    place, passes = environ.get(TRACE_VARIABLE, ""), environ.get(PASSES_VARIABLE, str(PASSES))
    if not place:
        raise ConfigError(f"{STRATEGY_VARIABLE} is {STRATEGY} and {TRACE_VARIABLE} names no trace")
    if not passes.isdecimal() or int(passes) < 1:
        raise ConfigError(f"{PASSES_VARIABLE} is {passes!r}, expected a whole number from 1 on")
    found = read_load(place, ReadOptions())
    _install(parts_of(found.history), int(passes))
    log.info("replaying %s: %s windows, %s layers, %s experts", place, *found.history.tokens.shape)


def _install(parts: NDArray[np.float64], passes: int) -> None:
    from vllm.model_executor.layers.fused_moe.router import routing_simulator_router as simulator

    asked: Any = getattr(simulator.RoutingSimulator, "get_strategy", None)
    if getattr(asked, "replays", False):
        return
    require(REPLAY)
    base: Any = simulator.RoutingStrategy
    own = asked.__func__

    class LayerStrategy(base):  # type: ignore[misc]
        """Routes one layer of the model."""

        def __init__(self, layer: LayerRouting) -> None:
            self.layer = layer

        def route_tokens(
            self,
            hidden_states: torch.Tensor,
            router_logits: torch.Tensor,
            top_k: int,
            indices_type: torch.dtype | None = None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            rows, experts = len(hidden_states), router_logits.shape[-1]
            ids = self.layer.experts_of(rows, experts, top_k, hidden_states.device)
            weights = torch.ones((rows, top_k), dtype=torch.float32, device=ids.device)
            return weights, ids.to(indices_type or torch.long)

    num_layers, given = parts.shape[1], itertools.count()

    def next_layer() -> LayerRouting:
        number = next(given)
        if number == num_layers:
            log.warning("the model has more MoE layers than the trace, %d: they repeat", num_layers)
        return LayerRouting(parts[:, number % num_layers], passes)

    def get_strategy(cls: Any, strategy_name: str) -> Any:
        # Every router asks once when its layer is built, and layers are built in their order.
        if strategy_name == STRATEGY:
            return LayerStrategy(next_layer())
        return own(cls, strategy_name)

    get_strategy.replays = True  # type: ignore[attr-defined]
    simulator.RoutingSimulator.register_strategy(
        STRATEGY, LayerStrategy(LayerRouting(parts[:, 0], passes))
    )
    simulator.RoutingSimulator.get_strategy = classmethod(get_strategy)


def parts_of(history: LoadHistory) -> NDArray[np.float64]:
    """[T, L, E] parts of the tokens of each window, without windows that lack some layer's.

    Raises:
        HistoryError: no window has tokens in every layer.
    """
    tokens = history.tokens[history.tokens.sum(axis=2).min(axis=1) > 0]
    if not len(tokens):
        raise HistoryError("the trace has no window with tokens in every layer")
    parts: NDArray[np.float64] = tokens / tokens.sum(axis=2, keepdims=True)
    return parts


class LayerRouting:
    """One layer of a trace as routing.

    Args:
        parts: [T, E] of the tokens of each window; each row sums to 1.
        passes: of each window.
    """

    def __init__(self, parts: NDArray[np.float64], passes: int) -> None:
        self._parts, self._passes = parts, passes
        self._ends: torch.Tensor | None = None  # [T, E] upper ends of the experts' parts of 0 .. k
        self._pass = torch.zeros((), dtype=torch.int64)  # number of the pass, on the device

    def experts_of(
        self, num_rows: int, num_experts: int, top_k: int, device: torch.device
    ) -> torch.Tensor:
        """[B, k] experts of the rows of the next pass.

        Raises:
            HistoryError: the model has another number of experts, or too few for ``top_k``.
        """
        if self._ends is None:
            # vLLM's profiling pass comes before any graph is captured.
            self._ends = torch.from_numpy(self._table(num_experts, top_k)).to(device)
            self._pass = self._pass.to(device)
        window = self._pass // self._passes % len(self._ends)
        ends = self._ends.index_select(0, window.reshape(1))[0]
        row = torch.arange(num_rows, device=device, dtype=torch.float64)
        start = torch.frac(row * ROW_STEP + self._pass * PASS_STEP)
        points = start[:, None] + torch.arange(top_k, device=device)
        self._pass.add_(1)
        return torch.searchsorted(ends, points, right=True).clamp_(max=num_experts - 1)

    def _table(self, num_experts: int, top_k: int) -> NDArray[np.float64]:
        """[T, E] sums of the experts' chances, k in all and 1 at most for each."""
        found = self._parts.shape[1]
        if found != num_experts:
            raise HistoryError(f"the trace has {found} experts, the model has {num_experts}")
        if top_k > num_experts:
            raise HistoryError(f"{top_k} of {num_experts} experts cannot be chosen for a token")
        chance, is_full = self._parts * top_k, np.zeros(self._parts.shape, dtype=np.bool_)
        for _ in range(top_k):  # each turn brings an expert to its limit, or none is above it
            is_full |= chance > MOST_CHANCE
            # Where no other expert has tokens, the rest is spread over all of them.
            rest = np.where(is_full, 0.0, self._parts)
            rest += np.where(is_full | (rest.sum(axis=1, keepdims=True) > 0), 0.0, 1.0)
            left = top_k - MOST_CHANCE * is_full.sum(axis=1, keepdims=True)
            total = np.maximum(rest.sum(axis=1, keepdims=True), np.finfo(float).tiny)
            chance = np.where(is_full, MOST_CHANCE, rest / total * left)
        ends: NDArray[np.float64] = chance.cumsum(axis=1)
        # The last end is exact, whatever the rounding of the sum.
        return ends * (top_k / ends[:, -1:])
