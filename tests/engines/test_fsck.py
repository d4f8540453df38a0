"""The placement check in an engine's real balancer: planted faults are found and reported."""

from __future__ import annotations

import ast
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rebalance.engines.common.conform import all_faults
from rebalance.engines.common.fsck import rank_check
from rebalance.engines.common.fsck.check import (
    DeviceMaps,
    EngineView,
    agreed,
    digests_of,
    is_of_router,
)
from rebalance.engines.common.fsck.report import Report, report_of
from telemetry import open_store
from tests.support.engines.installed import engine
from tests.support.engines.ranks import (
    EACH,
    NAME,
    NUM_EXPERTS,
    NUM_RANKS,
    NUM_SLOTS,
    config_in,
    look_in_every_pass,
    on_ranks,
    settings_in,
    weights_of,
)

pytestmark = pytest.mark.slow
MODELS = {"vllm": "vllm.model_executor.models", "sglang": "sglang.srt.models"}
FIRST = np.arange(NUM_SLOTS) % NUM_EXPERTS  # the map of the start, on all layers
LAYER, SLOT, RANK = 2, 10, 1  # of the wrong slot, the slot by the numbers of all ranks


def names_by_expert(source: str) -> set[str]:
    """Names of parameters that a model's source makes with one number for each expert."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Assign) and ast.unparse(node.value).count("Parameter(")):
            continue
        made = next((one for one in ast.walk(node.value) if is_made_by_size(one)), None)
        if made is not None:
            names.add(ast.unparse(node.targets[0]).rpartition(".")[2])
    return names


def is_made_by_size(node: ast.AST) -> bool:
    """Whether a call makes a tensor of one dimension, which is the number of experts."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.")):
        return False
    sizes = node.args[0].elts if node.args and isinstance(node.args[0], ast.Tuple) else node.args
    return len(sizes) == 1 and "expert" in ast.unparse(sizes[0])


@pytest.fixture(scope="module")
def by_file() -> dict[str, set[str]]:
    """Names of parameters with one number for each expert, by the engine's model file."""
    spec = find_spec(MODELS[engine.NAME])
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    found = {
        file.name: names_by_expert(file.read_text(encoding="utf-8"))
        for file in sorted(Path(folder).glob("*.py"))
    }
    assert sum(map(bool, found.values())) >= 20, "model files with such a parameter"
    return {file: names for file, names in found.items() if names}


class Layer:
    """A layer without redundant experts on all ranks, with a router's parameters of some names."""

    def __init__(self, names: set[str]) -> None:
        self.held = np.arange(NUM_EXPERTS)
        self.ranks = [torch.nn.Module() for _ in range(NUM_RANKS)]
        for one in self.ranks:
            one.weight = torch.zeros(NUM_EXPERTS // NUM_RANKS, 32)
            for name in names:
                setattr(one, name, torch.nn.Parameter(torch.rand(NUM_EXPERTS).round(decimals=1)))
        for name in names:  # alike on all ranks, and in place when experts move
            for one in self.ranks[1:]:
                setattr(one, name, getattr(self.ranks[0], name))
        self.move(self.held)

    def move(self, held: np.ndarray) -> None:
        self.held = held
        self.map, self.lists = torch.from_numpy(held.copy()), torch.full((NUM_EXPERTS, 4), -1)
        self.lists[:, 0] = torch.from_numpy(np.argsort(held))
        for rank, experts in enumerate(held.reshape(NUM_RANKS, -1).tolist()):
            for place, expert in enumerate(experts):
                self.ranks[rank].weight[place] = weights_of(0, expert)[0]

    def view(self, rank: int) -> EngineView:
        ones = torch.ones(NUM_EXPERTS, dtype=torch.int64)
        return EngineView(
            [0],
            lambda row: (self.ranks[rank], [self.ranks[rank].weight]),
            lambda row: self.held,
            rank,
            NUM_RANKS,
            maps=lambda row: DeviceMaps(self.map, self.lists, ones, np.ones_like(self.held)),
        )


def test_no_false_fault_of_slots_and_device_maps_in_any_model_file(
    by_file: dict[str, set[str]],
) -> None:
    print(f"{len(by_file)} model files")
    for file, names in by_file.items():
        layer, random = Layer(names), np.random.default_rng(0)
        views = [layer.view(rank) for rank in range(NUM_RANKS)]
        references, faults = agreed(views[0], [digests_of(view) for view in views])
        for _ in range(3):
            faults += [fault for view in views for fault in all_faults(view, references)]
            layer.move(random.permutation(NUM_EXPERTS))
        assert not faults, (file, names, faults[0])
        layer.map[3] = int(layer.map[4])
        assert {fault.kind for fault in all_faults(views[0], references)} == {"map"}, file


def test_parameters_of_all_model_files_with_one_number_for_each_expert_are_of_the_router(
    by_file: dict[str, set[str]],
) -> None:
    slots = torch.zeros(NUM_SLOTS)
    odd = {f"{file}: {name}" for file, names in by_file.items() for name in names}
    assert {one for one in odd if not is_of_router(one.partition(": ")[2], slots)} == set()


def started(rank: int, config: Path) -> Any:
    """A rank after some maps, which looks at a slot in each pass."""
    look_in_every_pass()
    made = engine.make_rank(rank, config)
    made.until_maps(3)
    while made.checks is None:  # the first maps serve before the ranks have agreed
        made.steps()
    return made


def reported(config: Path) -> Report:
    """What ``eplb fsck`` prints."""
    with closing(open_store(settings_in(config).deployment.store, NAME)) as store:
        return report_of(store)


def wrong_slot(rank: int, config: Path) -> dict[str, Any]:
    """One slot gets the tensors of another expert, after some maps."""
    made = started(rank, config)
    if rank == RANK:
        other = weights_of(LAYER, (int(made.held[LAYER, SLOT]) + 5) % NUM_EXPERTS)
        for tensor, record in zip(made.layers[LAYER], other, strict=True):
            tensor[SLOT - RANK * EACH] = record
    made.visit_all()
    return made.result()


def test_slot_with_another_expert_is_found_and_reported(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    found = on_ranks(wrong_slot, config)

    planted = [("slot", LAYER, SLOT, "weight"), ("slot", LAYER, SLOT, "scale")]
    by_rank = [[(it.kind, it.row, it.slot, it.name) for it in one["faults"]] for one in found]
    assert by_rank == [[], planted, [], []]
    assert [one["placement"] for one in found] == [1.0, 0.0, 1.0, 1.0]
    report = reported(config)
    expert = found[RANK]["map"][LAYER][SLOT]
    assert report.ranks == dict.fromkeys(range(NUM_RANKS), "")
    assert min(report.rounds.values()) >= 1
    assert report.faults[0] == (
        f"rank {RANK}: layer {LAYER} slot {SLOT} expert {expert}: weight has the bytes of expert "
        f"{(expert + 5) % NUM_EXPERTS}, expected those of the expert that the map names"
    )
    assert report.lines[-1] == "2 faults"


def lost_scales(rank: int, config: Path) -> dict[str, Any]:
    """The engine moves weights alone."""
    look_in_every_pass()
    made = engine.make_rank(rank, config, forgets=True)
    made.until_experts_move(np.tile(FIRST, (len(made.held), 1)))  # the first fault stops moves
    made.visit_all()
    return made.result()


def test_scales_that_the_engine_does_not_move_are_found_in_every_moved_slot(
    tmp_path: Path,
) -> None:
    found = on_ranks(lost_scales, config_in(tmp_path))

    held = np.array(found[0]["map"])
    moved = {(row, slot) for row in engine.MOE for slot in np.flatnonzero(held[row] != FIRST)}
    assert moved, "plans have moved experts"
    for rank, one in enumerate(found):
        wrong = {(fault.row, fault.slot) for fault in one["faults"]}
        assert wrong >= {(row, slot) for row, slot in moved if slot // EACH == rank}
        assert {(fault.kind, fault.name) for fault in one["faults"]} <= {("slot", "scale")}
        assert one["placement"] == float(not wrong)


def without_weights(rank: int, config: Path) -> dict[str, Any]:
    """On one rank the tensors of the layers cannot be read."""

    def fails(*_: object) -> Any:
        raise RuntimeError("planted")

    if rank == RANK:
        rank_check.check.digests_of = fails
    return started(rank, config).result()


def test_rank_that_cannot_check_switches_the_check_off_on_all(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    found = on_ranks(without_weights, config)

    assert [(one["faults"], one["placement"]) for one in found] == [([], 0.0)] * NUM_RANKS
    assert set(reported(config).ranks.values()) == {f"rank {RANK}: RuntimeError: planted"}
