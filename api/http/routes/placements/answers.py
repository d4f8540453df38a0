"""Answers about placements: one, their history, what differs between two, one as a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from api.http.problems import ProblemType, Refused
from api.http.routes.placements.diff import changed_layers, layer_tables
from api.http.routes.placements.schemas import (
    LayerDiff,
    PlacementAnswer,
    PlacementDiff,
    PlacementLine,
    PlacementsPage,
    RankChange,
    ShareChange,
)
from api.http.service import page_of
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError, EplbError, HistoryError, PlacementError
from eplb.migration.serialisation import model_from_dict, topology_from_dict
from telemetry.formats.table import WriteOptions, placement_bytes
from telemetry.formats.types import Layers, PlacementFile
from telemetry.state.placements import CommittedPlacement
from telemetry.state.store import StateStore

Engine = Literal["sglang", "vllm", "trtllm", "ascend", "eplb"]
NAME_OF: dict[Engine, tuple[str, str]] = {  # ending and media type
    "sglang": ("json", "application/json"),
    "vllm": ("jsonl", "application/jsonl"),
    "trtllm": ("yaml", "application/yaml"),
    "ascend": ("json", "application/json"),
    "eplb": ("json", "application/json"),
}


@dataclass(frozen=True)
class EngineFile:
    """A placement as an engine's file."""

    name: str
    data: bytes
    media_type: str
    notes: tuple[str, ...]  # what was repaired or is lost


class Placements:
    """The placements of a store. Any thread may call any method."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def one(self, generation: int | None) -> PlacementAnswer:
        """The committed placement, or the one of a generation.

        Raises:
            Refused: nothing is committed yet, or not that generation.
        """
        found = self._store.committed() if generation is None else self._found(generation)
        if found is None:
            raise Refused(ProblemType.NO_SUCH_PLACEMENT, "the store holds no committed placement")
        placement = found.placement
        return PlacementAnswer(
            **_line(found),
            num_experts=placement.num_experts,
            slot_to_expert=placement.slot_to_expert.tolist(),
            slot_share=placement.slot_share.tolist(),
        )

    def history(self, limit: int, before: int | None = None) -> PlacementsPage:
        """Those below a generation, newest first; None: from the newest."""
        found = self._store.placements(limit + 1, before=before)
        page, following = page_of(found, limit, lambda one: one.placement.generation)
        return PlacementsPage(
            placements=[PlacementLine(**_line(one)) for one in page], next=following
        )

    def diff(self, base: int, target: int, *, after: int | None, limit: int) -> PlacementDiff:
        """What differs, on the ranks of the current run.

        Args:
            base: a generation.
            target: a generation.
            after: the layers past this one are given; None: from the first.
            limit: of the layers that are given.

        Raises:
            Refused: no such generation, no run, or a placement of other ranks or another model.
        """
        old, new = self._found(base), self._found(target)
        model, topology = shape_of_run(self._store)
        for one in (old, new):
            _check_fits(one.placement, model, topology)
        changed = changed_layers(old.placement, new.placement)
        moves = {
            layer: int(layer_tables(old.placement, new.placement, topology, layer).added.sum())
            for layer in changed
        }
        page = [layer for layer in changed if after is None or layer > after][:limit]
        is_last = not page or page[-1] == changed[-1]
        return PlacementDiff(
            base=PlacementLine(**_line(old)),
            target=PlacementLine(**_line(new)),
            changed_layers=len(changed),
            moves=sum(moves.values()),
            bytes=sum(moves.values()) * model.expert_bytes,
            layers=[_layer(old.placement, new.placement, model, topology, layer) for layer in page],
            next=None if is_last else page[-1],
        )

    def export(self, generation: int, engine: Engine, hidden_layers: int | None) -> EngineFile:
        """What ``eplb convert`` writes, for the ranks and layer numbers of the current run.

        Args:
            generation: of the placement.
            engine: that reads the file.
            hidden_layers: of the model, dense ones included; SGLang's file needs them.

        Raises:
            Refused: no such generation, no run, other ranks or another model, or the format cannot
                express it.
        """
        found = self._found(generation)
        model, topology = shape_of_run(self._store)
        _check_fits(found.placement, model, topology)
        provenance = {"deployment": self._store.deployment, "generation": generation}
        layers = Layers(tuple(model.layer_ids), "model")
        file = PlacementFile(found.placement, layers, topology.num_ranks, provenance=provenance)
        try:
            data, notes = placement_bytes(file, engine, WriteOptions(num_hidden=hidden_layers))
        except (ConfigError, HistoryError, PlacementError) as exc:
            why = f"generation {generation} as {engine}: {exc}"
            raise Refused(ProblemType.NOT_EXPRESSIBLE, why) from exc
        ending, media_type = NAME_OF[engine]
        return EngineFile(f"placement-{generation}.{engine}.{ending}", data, media_type, notes)

    def _found(self, generation: int) -> CommittedPlacement:
        found = self._store.placement(generation)
        if found is None:
            why = f"the store holds no placement that is generation {generation}"
            raise Refused(ProblemType.NO_SUCH_PLACEMENT, why)
        return found


def shape_of_run(store: StateStore) -> tuple[ModelShape, Topology]:
    """Give model and topology of the current run.

    Raises:
        Refused: there is none, or they cannot be read.
    """
    info = store.current_run()
    if info is None:
        why = "no run has begun, expected one: it has the model and the ranks"
        raise Refused(ProblemType.NO_RUN, why)
    try:
        return model_from_dict(dict(info.model)), topology_from_dict(dict(info.topology))
    except (EplbError, LookupError, TypeError, ValueError) as exc:
        why = f"run {info.run!r} has no readable model or topology: {exc!r}"
        raise Refused(ProblemType.NO_RUN, why) from exc


def _line(line: CommittedPlacement) -> dict[str, Any]:
    """Fields of a PlacementLine."""
    placement = line.placement
    in_use = (placement.slot_to_expert >= 0).sum(axis=1)
    return {
        "generation": placement.generation,
        "time": line.time,
        "plan_id": line.plan_id,
        "reason": line.reason,
        "hash": placement.hash,
        "num_replicas": (in_use - placement.num_experts).tolist(),
    }


def _check_fits(placement: Placement, model: ModelShape, topology: Topology) -> None:
    found = placement.num_layers, placement.num_experts, placement.num_slots
    expected = model.num_layers, model.num_experts, topology.num_slots
    if found != expected:
        raise Refused(
            ProblemType.OTHER_SHAPE,
            f"generation {placement.generation} has layers, experts and slots {found}, expected "
            f"{expected} of the current run: it served under another model or other ranks",
        )


def _layer(
    base: Placement, target: Placement, model: ModelShape, topology: Topology, layer: int
) -> LayerDiff:
    tables = layer_tables(base, target, topology, layer)
    added, removed = tables.added, tables.removed
    before, after = tables.share
    return LayerDiff(
        layer=layer,
        layer_id=model.layer_ids[layer],
        bytes=int(added.sum()) * model.expert_bytes,
        ranks=[
            RankChange(rank=rank, added=_experts(added[rank]), removed=_experts(removed[rank]))
            for rank in np.flatnonzero((added | removed).any(axis=1)).tolist()
        ],
        shares=[
            ShareChange(
                rank=rank,
                expert=expert,
                before=round(float(before[rank, expert]), 6),
                after=round(float(after[rank, expert]), 6),
            )
            for rank, expert in np.argwhere(tables.reshared).tolist()
        ],
    )


def _experts(chosen: NDArray[np.bool_]) -> list[int]:
    experts: list[int] = np.flatnonzero(chosen).tolist()
    return experts
