"""What the controller asks of the planner: objective, rule, constraints and speeds.

All are settings of the deployment. What was asked is recorded with each plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.constraints import Constraints, Which, room_of
from eplb.core.cost import CostModel
from eplb.core.dispatch import DispatchRuleName
from eplb.core.kernels import Curve
from eplb.core.load import LoadHistory
from eplb.core.model import ModelShape, position_in, spans
from eplb.core.placement import Placement
from eplb.core.problem import AskedObjective
from eplb.core.topology import Topology
from eplb.decision.redundancy import slots_per_layer
from eplb.declared import Setting, check_fields
from eplb.errors import ConfigError
from eplb.fitting import (
    Cordon,
    Cordons,
    Coverage,
    FittingCordons,
    FittingPins,
    Pins,
    coverage_of,
    fitting_cordons,
    fitting_pins,
)

SHOWN = 32  # uncovered experts, and pins, that an event lists
MOST_SLOTS = 2**31
SHOWN_TEXT = 4096  # characters of a setting; 320 ranks with speeds of two digits take 2,800
# Entries of lists, as texts may write them; that nothing is named twice is left to the readers.
_NUMBER = r"[0-9]{1,6}"
_SPEED = rf"{_NUMBER}:(0\.[0-9]{{0,6}}[1-9]|[1-9][0-9]{{0,5}}(\.[0-9]{{1,6}})?)"
_POINT = rf"{_NUMBER}:(0\.[0-9]{{0,6}}[1-9]|[1-9][0-9]{{0,8}}(\.[0-9]{{1,6}})?)"
_PIN = rf"(\*|{_NUMBER})/{_NUMBER}:{_NUMBER}(\+{_NUMBER})*"
_CORDON = rf"{_NUMBER}:(cordon|drain)"


def curve_of(text: str) -> Curve:
    """Read "tokens:us, tokens:us"; "" is no curve.

    Raises:
        ConfigError: something else, or figures that are no curve.
    """
    points = tuple((float(tokens), us) for _, tokens, us in _pairs(text))
    try:
        return CostModel(curve=points).curve
    except ConfigError as exc:
        raise ConfigError(
            f"curve has {text[:SHOWN]!r}, expected tokens:us for two numbers of tokens or more, "
            f"such as '1:13, 64:15, 1024:125': {exc}"
        ) from exc


def speeds_of(text: str) -> dict[int, float]:
    """Read "rank:speed, rank:speed".

    Raises:
        ConfigError: something else.
    """
    speeds: dict[int, float] = {}
    for part, rank, speed in _pairs(text):
        if rank < 0 or not 0 < speed < float("inf") or rank in speeds:
            raise ConfigError(
                f"rank_speed has {part!r}, expected rank:speed for each rank once, such as "
                "'3:0.8, 7:0.9', speeds above 0"
            )
        speeds[rank] = speed
    return speeds


def redundancy_of(text: str) -> dict[int, int]:
    """Read "layer:slots, layer:slots".

    Raises:
        ConfigError: something else.
    """
    slots: dict[int, int] = {}
    for part, layer, count in _pairs(text):
        if layer < 0 or not 0 <= count < MOST_SLOTS or count % 1 or layer in slots:
            raise ConfigError(
                f"redundancy has {part!r}, expected layer:slots for each layer once, such as "
                "'0:16, 7:4', whole numbers of 0 or more"
            )
        slots[layer] = int(count)
    return slots


def read_pins(text: str) -> dict[Which, tuple[int, ...]]:
    """Read "layer/expert:rank+rank, ..."; the layer * is each one.

    Raises:
        ConfigError: something else.
    """
    pins: dict[Which, tuple[int, ...]] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        which: Which = -1
        ranks: tuple[int, ...] = ()
        if re.fullmatch(_PIN, part):
            layer, expert, *named = re.split(r"[/:+]", part)
            which = int(expert) if layer == "*" else (int(layer), int(expert))
            ranks = tuple(map(int, named))
        if not ranks or which in pins or len(set(ranks)) < len(ranks):
            raise ConfigError(
                f"pins has {part!r}, expected layer/expert:rank+rank for each expert of a layer "
                "once and each rank once, such as '3/17:0+4, */5:2'"
            )
        pins[which] = ranks
    return pins


def written_pins(pins: Pins) -> str:
    """Write pins as ``read_pins`` reads them, in one order."""

    def place(which: Which) -> tuple[int, int]:
        return (-1, which) if isinstance(which, int) else which

    parts = []
    for which in sorted(pins, key=place):
        layer, expert = place(which)
        ranks = "+".join(map(str, sorted(pins[which])))
        parts.append(f"{'*' if layer < 0 else layer}/{expert}:{ranks}")
    return ", ".join(parts)


def read_cordons(text: str) -> dict[int, Cordon]:
    """Read "rank:cordon, rank:drain".

    Raises:
        ConfigError: something else.
    """
    cordons: dict[int, Cordon] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        rank, _, cordon = part.partition(":")
        if not re.fullmatch(_CORDON, part) or int(rank) in cordons:
            raise ConfigError(
                f"cordons has {part!r}, expected rank:cordon or rank:drain for each rank once, "
                "such as '3:cordon, 7:drain'"
            )
        cordons[int(rank)] = Cordon(cordon)
    return cordons


def written_cordons(cordons: Cordons) -> str:
    """Write cordons as ``read_cordons`` reads them, in one order."""
    return ", ".join(f"{rank}:{cordons[rank]}" for rank in sorted(cordons))


def cordons_in_force(text: str, leaving: Iterable[int]) -> dict[int, Cordon]:
    """Cordons of operators, and drains of the ranks that are to leave.

    Args:
        text: as ``read_cordons`` takes it.
        leaving: as ``leavers`` gives them.
    """
    return read_cordons(text) | dict.fromkeys(leaving, Cordon.DRAIN)


def _pairs(text: str) -> Iterator[tuple[str, int, float]]:
    """Each "number:figure" of a list, as text and read; (text, -1, -1) where it is none."""
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        number, _, figure = part.partition(":")
        try:
            yield part, int(number), float(figure)
        except ValueError:
            yield part, -1, -1.0


def _list_of(item: str) -> str:
    return rf"^({item}(, ?{item})*)?$"


@dataclass(frozen=True)
class PlannerRequest:
    """What a plan is asked for, beside policy, cost and budget.

    Raises:
        ConfigError: a value that no plan can use.
    """

    objective: Annotated[
        AskedObjective,
        Setting(
            "what a plan balances: tokens, or the experts' time by a measured curve; `auto`: time "
            "where the curve was given or measured and reading weights takes longer than the "
            "products of a step's tokens, else tokens",
            live=True,
        ),
    ] = "auto"
    curve: Annotated[
        str,
        Setting(
            "microseconds of an expert by its tokens in a step, `tokens:us, ...`; empty: as the "
            "ranks measured it at their start, else that of DeepSeek-V3 in FP8 on an H200",
            max_length=4_000,
            pattern=_list_of(_POINT),
            check=curve_of,
            live=True,
        ),
    ] = ""
    dispatch: Annotated[
        DispatchRuleName,
        Setting("rule by which the engine chooses the replica for a token", live=True),
    ] = "weighted"
    min_domains: Annotated[
        int,
        Setting(
            "failure domains of each expert, the costliest experts first, as far as slots allow",
            unit="domains",
            at_least=1,
            live=True,
        ),
    ] = 1
    rank_speed: Annotated[
        str,
        Setting(
            "measured speeds, `rank:speed, ...`; 1 is nominal, and that of ranks without one",
            max_length=20_000,
            pattern=_list_of(_SPEED),
            check=speeds_of,
            live=True,
        ),
    ] = ""
    redundancy: Annotated[
        str,
        Setting(
            "redundant slots that a layer uses, `layer:slots, ...`, by the model's layer "
            "numbers; those without one use all",
            max_length=20_000,
            pattern=_list_of(rf"{_NUMBER}:{_NUMBER}"),
            check=redundancy_of,
            live=True,
        ),
    ] = ""
    pins: Annotated[
        str,
        Setting(
            "ranks that must hold an expert, `layer/expert:rank+rank, ...`, by the model's layer "
            "numbers, `*`: each layer; see /api/v1/pins",
            max_length=20_000,
            pattern=_list_of(_PIN),
            check=read_pins,
            live=True,
        ),
    ] = ""
    cordons: Annotated[
        str,
        Setting(
            "ranks that take no further experts, `rank:cordon`, or hold none, `rank:drain`; see "
            "/api/v1/ranks",
            max_length=20_000,
            pattern=_list_of(_CORDON),
            check=read_cordons,
            live=True,
        ),
    ] = ""
    decode_weight: Annotated[
        float,
        Setting(
            "weight of decode in a plan, for ranks that serve prefill too; 0: phases are summed",
            at_most=0.99,
            live=True,
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    def topology(self, topology: Topology) -> Topology:
        """The topology with the measured speeds.

        Raises:
            ConfigError: a speed of a rank that is not there.
        """
        speeds = speeds_of(self.rank_speed)
        if not speeds:
            return topology
        found: NDArray[np.float64] = topology.rank_speed.copy()
        for rank, speed in speeds.items():
            if rank >= topology.num_ranks:
                raise ConfigError(
                    f"rank_speed names rank {rank}, expected 0..{topology.num_ranks - 1}"
                )
            found[rank] = speed
        return replace(topology, rank_speed=found)

    def cordoned(self, current: Placement, topology: Topology, num_groups: int) -> FittingCordons:
        """Cordons that the ranks can meet from ``current``, and why not the others."""
        return fitting_cordons(read_cordons(self.cordons), current, topology, num_groups)

    def coverage(
        self, past: LoadHistory, current: Placement, cordons: FittingCordons, model: ModelShape
    ) -> Coverage:
        """Constraints on slots, pins and failure domains that fit, and what is left out.

        Args:
            past: load, by which experts are covered.
            current: the placement that serves.
            cordons: with the topology, as ``cordoned`` gives them for ``current``.
            model: has the layers and the expert groups.

        Raises:
            ConfigError: ``redundancy`` of a layer that is not there, or of more slots.
        """
        tokens, topology = past.tokens.sum(axis=0), cordons.topology
        room, pins = self._fitting_pins(current, cordons, model)
        # Further failure domains are asked for in the slots that pins leave.
        num_groups = model.num_expert_groups
        found = coverage_of(tokens, pins.left, topology, self.min_domains, num_groups)
        is_limited = cordons.cordoned or redundancy_of(self.redundancy)
        limits = room if is_limited else None
        return replace(
            found,
            constraints=replace(found.constraints, slots=limits, pinned=pins.pinned),
            uncovered=tuple((model.layer_ids[layer], expert) for layer, expert in found.uncovered),
            releases_groups=found.releases_groups or cordons.releases_groups,
            unmet_pins=pins.unmet,
            unmet_cordons=cordons.unmet,
        )

    def unmet_pins(
        self, current: Placement | None, topology: Topology, model: ModelShape
    ) -> tuple[str, ...]:
        """Reasons why the ranks cannot meet pins; without ``current`` cordons are not looked at."""
        cordons = FittingCordons(topology)
        if current is not None:
            cordons = self.cordoned(current, topology, model.num_expert_groups)
        _, pins = self._fitting_pins(current, cordons, model)
        return pins.unmet

    def _fitting_pins(
        self, current: Placement | None, cordons: FittingCordons, model: ModelShape
    ) -> tuple[NDArray[np.int64], FittingPins]:
        """[L, R] slots that layers may use beside the cordons, and the pins that fit into them."""
        topology = cordons.topology
        limits = Constraints(slots=self.slots(topology, model))
        room = room_of(limits, topology, model.num_layers)
        if current is not None:
            room = cordons.limited(room, current)
        return room, fitting_pins(
            read_pins(self.pins),
            room,
            topology,
            model.num_experts,
            model.num_expert_groups,
            cordons.kept,
            model.layer_ids,
        )

    def slots(self, topology: Topology, model: ModelShape) -> NDArray[np.int64] | None:
        """[L, R] slots that layers may use; None: all. Those of dead or drained ranks are not
        missed."""
        asked = redundancy_of(self.redundancy)
        if not asked:
            return None
        live = int(topology.usable_slots.sum())
        counts, most = np.full(model.num_layers, live), topology.num_slots - model.num_experts
        for layer, redundant in asked.items():
            if layer not in model.layer_ids or redundant > most:
                raise ConfigError(
                    f"redundancy gives layer {layer} {redundant} redundant slots, expected layers "
                    f"{spans(model.layer_ids)} and 0..{most} slots"
                )
            counts[position_in(model.layer_ids, layer)] = min(model.num_experts + redundant, live)
        return slots_per_layer(counts, topology)

    def recorded(self, coverage: Coverage) -> dict[str, Any]:
        """What was asked and what of it does not fit, as details of an event."""
        asked = dict(vars(self))
        for name in ("curve", "rank_speed", "redundancy", "pins", "cordons"):
            if len(text := asked[name]) > SHOWN_TEXT:
                digest = sha256(text.encode()).hexdigest()
                asked[name] = f"{len(text)} characters, sha256 {digest}"
        if coverage.uncovered:
            asked["num_uncovered"] = len(coverage.uncovered)
            asked["uncovered"] = [list(one) for one in coverage.uncovered[:SHOWN]]
        if coverage.unmet_pins:
            asked["num_unmet_pins"] = len(coverage.unmet_pins)
            asked["unmet_pins"] = list(coverage.unmet_pins[:SHOWN])
        if coverage.unmet_cordons:
            asked["unmet_cordons"] = list(coverage.unmet_cordons[:SHOWN])
        if coverage.releases_groups:
            asked["releases_groups"] = True
        return asked
