"""A plan for an engine's file: planned, written, read back, and judged as the engine would run it.

Shapes:  T windows, L MoE layers, E experts, P slots, R ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import numpy as np

from eplb.core.load import LoadHistory
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.decision.gate import CostModel
from eplb.decision.outcome import Plan
from eplb.dispatch_rules.plans import booked_and_effective
from eplb.dispatch_rules.rules import DispatchRule
from eplb.errors import ConfigError
from eplb.migration.moves import LINKS, link_of, moves_between
from eplb.planner import plan
from telemetry.formats.bounded import file_digest
from telemetry.formats.table import WriteOptions, read_placement, write_placement
from telemetry.formats.types import LoadFile, PlacementFile, ReadOptions

# What each engine does by default; --dispatch names another one.
RULES = {
    "sglang": DispatchRule.SGLANG_STATIC,
    "vllm": DispatchRule.EVEN,
    "trtllm": DispatchRule.EVEN,
    "ascend": DispatchRule.ASCEND_MOD,
    "eplb": DispatchRule.WEIGHTED,
}


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """What ``eplb plan`` was asked for."""

    load: LoadFile
    serving: PlacementFile | None
    group: tuple[int, int, int]  # ranks, nodes, redundant experts
    target: str
    rule: DispatchRule | None
    policy: str
    model: ModelShape | None
    expert_bytes: int
    seed: int
    output: Path
    num_hidden: int | None
    source: str
    options: ReadOptions

    @property
    def dispatch(self) -> DispatchRule:
        """The rule that the plan is made and judged for."""
        return self.rule or RULES[self.target]


@dataclass(frozen=True, eq=False)
class Outcome:
    """A plan, and its placement as it was read back from the written file."""

    request: PlanRequest
    plan: Plan
    written: Placement
    notes: tuple[str, ...]


def plan_for_engine(request: PlanRequest) -> Outcome:
    """Plan, write the engine's file, and read it back.

    Raises:
        ConfigError: ranks, nodes, slots and model that do not fit the load.
    """
    load, notes = request.load, request.load.notes
    topology = _topology(request.group, load.history.num_experts)
    serving, said = _serving(request, topology)
    shape = _shape(request)
    made = plan(
        load.history,
        topology,
        model=shape,
        current=serving,
        policy=request.policy,
        # Nothing that serves is known: the file is for a start, at which no move is paid for.
        cost=CostModel() if serving is not None else CostModel(pay_back_s=inf),
        seed=request.seed,
        dispatch=request.dispatch,
    )
    num_ranks = topology.num_ranks
    file = PlacementFile(
        made.target,
        load.layers,
        num_ranks,
        load.model,
        provenance={
            "source": request.source,
            "policy": request.policy,
            "dispatch": request.dispatch.value,
            "plan": made.hash,
        },
    )
    current = None if serving is None else replace(file, placement=serving)
    options = WriteOptions(num_ranks, request.num_hidden, current)
    lost = write_placement(file, request.target, request.output, options)
    return Outcome(request, made, _read_back(request, file), (*notes, *said, *lost))


def _read_back(request: PlanRequest, file: PlacementFile) -> Placement:
    """The written placement, as the engine will read it."""
    ids = file.layers.ids if file.layers.axis == "model" else None
    options = ReadOptions(layer_ids=ids, num_experts=file.placement.num_experts)
    found = read_placement(str(request.output), options, request.target).placement
    assert found.num_layers == file.placement.num_layers, "the layers that were written"
    return found


def _topology(group: tuple[int, int, int], num_experts: int) -> Topology:
    num_ranks, num_nodes, redundant = group
    if num_ranks % num_nodes:
        raise ConfigError(f"{num_ranks} ranks on {num_nodes} nodes, expected equally many on each")
    slots = num_experts + redundant
    if slots % num_ranks:
        raise ConfigError(
            f"{num_experts} experts and {redundant} redundant ones on {num_ranks} ranks, expected "
            f"a multiple of {num_ranks} slots: {-num_experts % num_ranks} redundant ones or so "
            f"many more"
        )
    return Topology.uniform(num_nodes, num_ranks // num_nodes, slots // num_ranks)


def _serving(request: PlanRequest, topology: Topology) -> tuple[Placement | None, tuple[str, ...]]:
    """The serving placement, where it is one of these slots and layers."""
    file = request.serving
    if file is None:
        return None, ("no placement that serves is known: the plan is for a start of the engine",)
    found = file.placement
    same = (
        file.layers.ids == request.load.layers.ids and file.layers.axis == request.load.layers.axis
    )
    if same and (found.num_slots, found.num_experts) == (
        topology.num_slots,
        request.load.history.num_experts,
    ):
        return found.with_generation(max(found.generation, 0)), ()
    return None, (
        f"the placement that serves has {found.num_layers} layers x {found.num_slots} slots for "
        f"{found.num_experts} experts, and is not one of these layers and slots: planned fresh",
    )


def _shape(request: PlanRequest) -> ModelShape | None:
    """The model, cut to the layers of the load."""
    history, model = request.load.history, request.model
    if model is None:
        if not request.expert_bytes:
            return None
        ids = request.load.layers.ids
        return ModelShape(ids, history.num_experts, 1, 0, 0, expert_bytes=request.expert_bytes)
    if model.num_experts != history.num_experts or model.num_layers != history.num_layers:
        raise ConfigError(
            f"the load has {history.num_layers} layers x {history.num_experts} experts, the model "
            f"{model.num_layers} x {model.num_experts}"
        )
    return replace(model, expert_bytes=request.expert_bytes) if request.expert_bytes else model


def render(outcome: Outcome) -> str:
    """The plan as text, a fact a line."""
    request, made = outcome.request, outcome.plan
    ranks, nodes, redundant = request.group
    history: LoadHistory = request.load.history
    layers = request.load.layers
    problem: Problem = made.problem
    before, after = (booked_and_effective(problem, it) for it in (made.base, outcome.written))
    rule = request.dispatch.value
    lines = [
        f"load: {history.num_windows} windows, {history.num_layers} layers "
        f"({layers.ids[0]}..{layers.ids[-1]}, {layers.axis}) x {history.num_experts} experts",
        f"group: {ranks} ranks on {nodes} nodes, {redundant} redundant experts, "
        f"{problem.topology.num_slots} slots a layer",
        f"imbalance            booked   under {rule}",
        f"  before          {before[0]:9.4f} {before[1]:9.4f}",
        f"  after           {after[0]:9.4f} {after[1]:9.4f}",
        f"  lower bound     {float(made.lower_bound.mean()):9.4f}",
        f"decision: {made.decision.value}: {made.reason}",
        _cost(outcome),
    ]
    lines += [f"note: {note}" for note in dict.fromkeys(outcome.notes)]
    lines.append(f"written: {request.output}{file_digest(request.output)}")
    return "\n".join(lines)


def _cost(outcome: Outcome) -> str:
    """What the change would cost in a running engine."""
    made, topology = outcome.plan, outcome.plan.topology
    moves = moves_between(made.base, outcome.written, topology)
    if not moves:
        return "cost: no expert moves"
    links = Counter(link_of(move, topology) for move in moves)
    received = np.bincount(
        [topology.rank_of_slot[move.dst_slot] for move in moves], minlength=topology.num_ranks
    )
    each, cost = made.expert_bytes, made.problem.cost
    base = "the serving placement" if outcome.request.serving is not None else "experts in order"
    text = f"cost from {base}: {len(moves)} experts move"
    by_link = ", ".join(f"{link} {links[link]}" for link in LINKS if links[link])
    if not each:
        return f"{text} ({by_link}); bytes and seconds need --model or --expert-bytes"
    seconds = int(received.max()) * cost.move_seconds(each) + cost.seconds_per_rebalance
    return (
        f"{text} ({by_link}), {len(moves) * each / 1e9:.2f} GB, {seconds:.2f} s at "
        f"{cost.bytes_per_s / 1e9:g} GB/s on the rank that receives most"
    )
