"""A plan for an engine: planned, written to its file, read back, and judged by its rule."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api.sglang_start import start_map, start_shares
from eplb.core.cost import CostModel
from eplb.core.dispatch import DispatchRule, effective_shares
from eplb.core.model import ModelShape, spans
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.decision.alternatives import ROUNDING
from eplb.decision.outcome import Plan
from eplb.decision.score import booked_and_effective
from eplb.errors import ConfigError, counted
from eplb.measure import imbalance
from eplb.migration.build import LINKS, link_of, moves_between
from eplb.planner import plan
from simulations.inputs import busy_windows, model_of
from telemetry.formats.engines.sglang import MAP
from telemetry.formats.table import placement_bytes, read_placement
from telemetry.formats.types import LoadFile, PlacementFile, ReadOptions, WriteOptions
from telemetry.written_files import file_digest, write_atomically

# What each engine does by default; --dispatch names another one.
RULES = {
    "sglang": DispatchRule.SGLANG_STATIC,
    "vllm": DispatchRule.EVEN,
    "trtllm": DispatchRule.EVEN,
    "ascend": DispatchRule.ASCEND_MOD,
    "eplb": DispatchRule.WEIGHTED,
}


FITTED = (
    "imbalance is that of the windows that the plan was made for; eplb recommend and simulate "
    "judge on windows that follow"
)


@dataclass(frozen=True)
class PlannedGroup:
    """The expert-parallel group that an engine serves with."""

    ranks: int
    nodes: int
    redundant: int  # redundant experts of a layer

    def topology(self, num_experts: int) -> Topology:
        """Give the ranks with their slots.

        Raises:
            ConfigError: ranks and nodes, or slots and ranks, do not divide.
        """
        if self.ranks % self.nodes:
            raise ConfigError(
                f"{self.ranks} ranks on {self.nodes} nodes, expected equally many on each"
            )
        slots = num_experts + self.redundant
        if slots % self.ranks:
            least = -num_experts % self.ranks
            fit = ", ".join(str(least + times * self.ranks) for times in range(3))
            raise ConfigError(
                f"{num_experts} experts and {self.redundant} redundant ones on {self.ranks} ranks, "
                f"expected equally many slots on each: {fit}, ... redundant ones"
            )
        return Topology.uniform(self.nodes, self.ranks // self.nodes, slots // self.ranks)


def plan_for_engine(
    load: LoadFile,
    serving: PlacementFile | None,
    group: PlannedGroup,
    target: str,
    output: Path,
    *,
    rule: DispatchRule | None,
    policy: str,
    model: ModelShape | None,
    expert_bytes: int | None,
    seed: int,
    num_hidden: int | None,
    source: str,
    at_start: bool,
) -> dict[str, Any]:
    """Plan, write the engine's file, read it back, and judge it; returns a JSON-ready report.

    Args:
        load: the windows to plan on.
        serving: the placement that the engine serves now; None: none is known.
        group: ranks, nodes and redundant experts of the engine.
        target: the engine, a key of RULES.
        output: the file to write.
        rule: for which the plan is made and judged; None: the engine's own.
        policy: name of the placement policy.
        model: sizes of the experts; None: not known.
        expert_bytes: bytes of one expert as served; None: those of the model.
        seed: of the planner.
        num_hidden: layers of the model, dense ones included; None: not known.
        source: name of the load for the file.
        at_start: whether the file is for a start of SGLang with an all-to-all, whose rule of
            choosing replicas is another one than that of its live rebalances.

    Raises:
        ConfigError: ranks, nodes, slots and model that do not fit the load.
        HistoryError: the load has no tokens.
    """
    history, idle_notes = busy_windows(load.history, source)
    load, notes = replace(load, history=history), [*load.notes, *idle_notes]
    if load.num_ranks not in (None, group.ranks):
        notes.append(f"recorded on {load.num_ranks} ranks, planned for {group.ranks}")
    topology, dispatch = group.topology(history.num_experts), rule or RULES[target]
    shape = _shape(load, model_of(model, history, source), expert_bytes)
    current, said = _serving(serving, load, topology)

    def planned(shape: ModelShape | None) -> Plan:
        # Nothing that serves is known: the file is for a start, at which no move is paid for.
        cost = CostModel() if current is not None else CostModel(pay_back_s=inf)
        return plan(
            history,
            topology,
            model=shape,
            current=current,
            policy=policy,
            cost=cost,
            seed=seed,
            dispatch=dispatch,
        )

    made = planned(shape)
    if shape is not None and made.problem.groups_stay:
        free = planned(replace(shape, num_expert_groups=1))
        notes.append(
            f"the model's {shape.num_expert_groups} expert groups stay on nodes, so that a token "
            f"goes to few of them: imbalance {made.effective:.4f} as decided, "
            f"{free.effective:.4f} with groups spread over nodes"
        )
    provenance = {
        "source": source,
        "policy": policy,
        "dispatch": dispatch.value,
        "plan": made.hash,
    }
    file = PlacementFile(made.target, load.layers, group.ranks, load.model, provenance=provenance)
    before = None if current is None else replace(file, placement=current)
    options = WriteOptions(group.ranks, num_hidden, before)
    for_live = file
    if at_start:
        if target != "sglang" or dispatch not in (DispatchRule.SGLANG_STATIC, DispatchRule.EVEN):
            raise ConfigError(
                f"--start is given for {target} under {dispatch.value}, expected sglang under "
                "sglang_static or even"
            )
        file = _for_start(made, file, options)
    data, further = placement_bytes(file, target, options)
    write_atomically(output, data)
    notes += [*said, *further]
    # As the engine will read it: the format may have repaired or lost something.
    ids = load.layers.ids if load.layers.axis == "model" else None
    reading = ReadOptions(layer_ids=ids, num_experts=history.num_experts)
    with TemporaryDirectory() as folder:  # what was written may be a pipe
        copy = Path(folder) / "placement"
        write_atomically(copy, data)
        written = read_placement(str(copy), reading, target).placement
    assert written.num_layers == made.target.num_layers, "the layers that were written"

    layers = load.layers
    judged = {"before": made.base, "after": written}
    if at_start:
        judged = {"before": made.base, "plan for live": for_live.placement, "for a start": written}
    found = {
        row: _imbalances(made, replace(file, placement=one), target, options)
        for row, one in judged.items()
    }
    names = list(found["before"])
    real = names[1]
    if not at_start and found["after"][real] > made.effective + ROUNDING:
        notes.append(
            f"{real} the file as written has imbalance {found['after'][real]:.4f}, "
            f"the plan as decided {made.effective:.4f}: the engine serves the file"
        )
    notes.append(FITTED)
    return {
        "windows": history.num_windows,
        "layers": list(layers.ids),
        "layer_axis": layers.axis,
        "experts": history.num_experts,
        "ranks": group.ranks,
        "nodes": group.nodes,
        "redundant": group.redundant,
        "slots": topology.num_slots,
        "imbalance": found,
        "lower_bound": float(made.lower_bound.mean()),
        "decision": made.decision.value,
        "objective": made.problem.objective,
        "reason": made.reason,
        "cost": _cost(
            made, written, "the serving placement" if current is not None else "experts in order"
        ),
        "notes": list(dict.fromkeys(notes)),
        "file": str(output),
        "digest": file_digest(output).strip(),
    }


def lines_of(report: dict[str, Any]) -> list[str]:
    """A report of ``plan_for_engine`` as lines for people."""
    layers, names = report["layers"], list(report["imbalance"]["before"])
    width = max(9, *map(len, names)) + 3
    rows = [
        f"  {row:14}" + "".join(f"{one[name]:{width}.4f}" for name in names)
        for row, one in report["imbalance"].items()
    ]
    return [
        f"load: {counted(report['windows'], 'window')}, {counted(len(layers), 'layer')} "
        f"({layers[0]}..{layers[-1]}, {report['layer_axis']}) x {report['experts']} experts",
        f"group: {counted(report['ranks'], 'rank')} on {counted(report['nodes'], 'node')}, "
        f"{counted(report['redundant'], 'redundant expert')} and {report['slots']} slots a layer",
        "imbalance       " + "".join(f"{name:>{width}}" for name in names),
        *rows,
        f"  lower bound     {report['lower_bound']:10.4f}",
        f"decision: {report['decision']}: {report['reason']}",
        f"{report['cost']}",
        *(f"note: {note}" for note in report["notes"]),
        " ".join(filter(None, ("written:", report["file"], report["digest"]))),
    ]


def _imbalances(
    made: Plan, file: PlacementFile, target: str, options: WriteOptions
) -> dict[str, float]:
    """Mean imbalance of a placement by its shares, then by what the engine does, by names.

    SGLang splits otherwise after a start with the file than after a rebalance; its draws go on from
    row to row of the whole map, so both are computed on the rows as the engine reads them.
    """
    rule, topology = made.problem.dispatch, made.topology
    booked, effective = booked_and_effective(made.problem, file.placement)
    is_static = rule is DispatchRule.SGLANG_STATIC
    if target != "sglang" or not (is_static or rule is DispatchRule.EVEN):
        return {"booked": booked, f"under {rule.value}": effective}
    held, rows = _engine_rows(file, options)
    whole = Placement(held, file.placement.num_experts)
    found = {"booked": booked}
    for name, share in (
        ("live", effective_shares(whole, topology, rule)),
        ("start", start_shares(held.astype(np.int64), topology, is_static=is_static)),
    ):
        served = Placement(held[rows], whole.num_experts, 0, share[rows].clip(0.0, 1.0))
        found[f"{name}, {'static' if is_static else 'dynamic'}"] = float(
            made.problem.mean_over_windows(imbalance(made.problem.work, served, topology)).mean()
        )
    return found


def _engine_rows(file: PlacementFile, options: WriteOptions) -> tuple[NDArray[np.int32], list[int]]:
    """[L, S] the map with all rows of SGLang, and which of them are those of the file."""
    data, _ = placement_bytes(file, "sglang", options)
    held, layers = np.array(json.loads(data)[MAP], dtype=np.int32), file.layers
    return held, list(layers.ids) if layers.axis == "model" else list(range(len(held)))


def _for_start(made: Plan, file: PlacementFile, options: WriteOptions) -> PlacementFile:
    """The file of a map that is made for a start, from the plan's."""
    (held, rows), old = _engine_rows(file, options), file.placement
    best = start_map(
        held.astype(np.int64),
        made.problem.history.tokens,
        rows,
        made.topology,
        is_static=made.problem.dispatch is DispatchRule.SGLANG_STATIC,
    )
    placement = Placement(best[rows].astype(np.int32), old.num_experts, old.generation)
    return replace(file, placement=placement)


def _serving(
    file: PlacementFile | None, load: LoadFile, topology: Topology
) -> tuple[Placement | None, tuple[str, ...]]:
    """The serving placement of the load's layers, if its slots fit, and notes about it."""
    if file is None:
        return None, ("no placement that serves is known: the plan is for a start of the engine",)
    found, notes = file.placement, tuple[str, ...]()
    if file.num_ranks not in (None, topology.num_ranks):
        return None, (
            f"the placement that serves has {file.num_ranks} ranks, the plan {topology.num_ranks}: "
            "planned fresh",
        )
    slots, planned = (
        (found.num_slots, found.num_experts),
        (topology.num_slots, load.history.num_experts),
    )
    if slots != planned:
        return None, (
            f"the placement that serves has {slots[0]} slots for {slots[1]} experts, the plan "
            f"{planned[0]} for {planned[1]}: planned fresh",
        )
    old, new = file.layers, load.layers
    if old.axis != "ordinal" and new.axis == "model" and set(new.ids) <= set(old.ids):
        found = found.of_layers(np.searchsorted(old.ids, new.ids))
    elif (old.ids, old.axis) != (new.ids, new.axis):
        difference = (
            f"the placement that serves has layers {spans(old.ids)} ({old.axis}), the load "
            f"{spans(new.ids)} ({new.axis})"
        )
        if "ordinal" not in (old.axis, new.axis) or len(old.ids) != len(new.ids):
            return None, (f"{difference}: planned fresh",)
        notes = (f"{difference}: taken for the same layers in order",)
    return found.with_generation(max(found.generation, 0)), notes


def _shape(load: LoadFile, model: ModelShape | None, expert_bytes: int | None) -> ModelShape | None:
    """The model with the stated bytes of an expert; None: neither is known."""
    if not expert_bytes:
        return model
    if model is not None:
        return replace(model, expert_bytes=expert_bytes)
    num_experts = load.history.num_experts
    return ModelShape(load.layers.ids, num_experts, 1, 0, 0, expert_bytes=expert_bytes)


def _cost(made: Plan, written: Placement, base: str) -> str:
    """What the change would cost in a running engine."""
    topology = made.topology
    moves = moves_between(made.base, written, topology)
    if not moves:
        return "cost: no expert moves"
    links = Counter(link_of(move, topology) for move in moves)
    received = np.bincount(
        [topology.rank_of_slot[move.dst_slot] for move in moves], minlength=topology.num_ranks
    )
    each, cost = made.expert_bytes, made.problem.cost
    text = f"cost from {base}: {len(moves)} experts move"
    by_link = ", ".join(f"{link} {links[link]}" for link in LINKS if links[link])
    if not each:
        return f"{text} ({by_link}); bytes and seconds need --model or --expert-bytes"
    seconds = int(received.max()) * cost.move_seconds(each) + cost.seconds_per_rebalance
    return (
        f"{text} ({by_link}), {len(moves) * each / 1e9:.2f} GB, {seconds:.2f} s at "
        f"{cost.bytes_per_s / 1e9:g} GB/s on the rank that receives most"
    )
