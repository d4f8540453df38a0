"""Records of an engine's experts without an engine: kept once, and given back to damaged slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb.errors import MigrationError
from rebalance.engines.common.fsck import check
from rebalance.engines.common.fsck.check import EngineView
from rebalance.engines.common.fsck.rank_check import RankCheck
from rebalance.engines.common.fsck.report import FAULT, REPAIRED
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.common.records import Kept, capture
from rebalance.weights.expert_records import write
from tests.support.limits import NEVER_S

ROWS, SLOTS, EXPERTS = (3, 5), 6, 4
HELD = np.array([[0, 1, 2, 3, 0, 1]] * len(ROWS))


class Experts(torch.nn.Module):
    """Of each expert other bytes; ``alpha`` is derived, and no engine moves it."""

    def __init__(self, row: int) -> None:
        super().__init__()
        salt = torch.from_numpy(1000.0 * row + HELD[0] + 1)
        self.register_buffer("weight", (salt[:, None] + torch.arange(5) / 8).float())
        self.register_buffer("scale", (salt % 251).to(torch.uint8))
        self.register_buffer("alpha", salt / 7)


class Model:
    """The experts of one rank of an engine."""

    def __init__(self) -> None:
        self.layers = {row: Experts(row) for row in ROWS}
        self.view = EngineView(ROWS, self.layer, lambda row: HELD[ROWS.index(row)], 0, 1)

    def layer(self, row: int) -> tuple[Experts, list[torch.Tensor]]:
        return self.layers[row], self.moved(row)

    def moved(self, row: int) -> list[torch.Tensor]:
        return [self.layers[row].weight, self.layers[row].scale]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    """A group of one rank."""
    file = tmp_path_factory.mktemp("group") / "meet"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def kept(model: Model, group: dist.ProcessGroup, tmp_path: Path) -> Iterator[Kept]:
    settings = PluginSettings(
        {
            "deployment.state_dir": tmp_path,
            "engine.records": "on",
            "host_cache.record_folder": tmp_path / "records",
        }
    )
    made = capture(lambda: ([model.moved(row) for row in ROWS], HELD), group, settings, "model")
    assert made is not None
    yield made
    made.close()


class Checked:
    """A check of the model that looks at a slot in each pass, and the events that it wrote."""

    def __init__(self, model: Model, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(check, "PART", 1e9)
        self.events: list[tuple[str, dict[str, Any]]] = []
        write = lambda kind, detail: self.events.append((kind, detail))  # noqa: E731
        self.check = RankCheck("vllm", lambda own: [own], write)
        self.check.begin(lambda: model.view)
        self.check.repair_from(kept)

    def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.check.visit(is_idle=True)

    def has(self, kind: str) -> bool:
        return any(event == kind for event, _ in self.events)

    def has_looked_at(self, *, row: int, slot: int) -> bool:
        looked = self.check._check._looked
        return looked is not None and (looked.row, looked.slot) == (row, slot)

    def go_round(self) -> None:
        last = self.check.num_checked + 2 * len(ROWS) * SLOTS
        self.until(lambda: self.check.num_checked >= last)


def test_offered_record_is_given_back_with_every_tensor(model: Model, kept: Kept) -> None:
    expected = [tensor.clone() for tensor in model.moved(5)]
    for tensor in model.moved(5):
        tensor[2] = 0

    assert not kept.is_right(1, 2, [tensor[2] for tensor in model.moved(5)])
    write(kept.bring(1, 2), [tensor[2] for tensor in model.moved(5)])
    assert all(torch.equal(*both) for both in zip(model.moved(5), expected, strict=True))


def test_closed_records_are_not_brought_by_a_new_connection(kept: Kept) -> None:
    kept.close()

    with pytest.raises(MigrationError, match="are closed"):
        kept.bring(0, 3)


def test_damaged_slot_is_repaired_from_its_record_between_two_passes(
    model: Model, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, expected = Checked(model, kept, monkeypatch), model.layers[3].weight.clone()
    model.layers[3].weight[4, 1] += 1

    checked.until(lambda: checked.has(REPAIRED))

    assert torch.equal(model.layers[3].weight, expected)
    checked.go_round()
    assert not checked.check.faults
    assert [kind for kind, _ in checked.events].count(FAULT) == 1


def test_slot_that_is_looked_at_while_its_record_arrives_is_no_fault_after_the_repair(
    model: Model, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = Checked(model, kept, monkeypatch)
    model.layers[3].weight[4, 1] += 1
    with kept._lock:  # the record does not come before the slot is looked at again
        checked.until(lambda: checked.has(FAULT))
        checked.until(lambda: checked.has_looked_at(row=3, slot=4))
    (bringing,) = (one for one in threading.enumerate() if one.name == "eplb-repair")
    bringing.join(NEVER_S)

    checked.until(lambda: checked.has(REPAIRED))

    checked.go_round()
    assert not checked.check.faults
    assert [kind for kind, _ in checked.events].count(FAULT) == 1


def test_weights_that_were_replaced_are_never_overwritten_by_records(
    model: Model, kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checked = Checked(model, kept, monkeypatch)
    model.layers[3].weight += 1
    replaced = model.layers[3].weight.clone()

    checked.until(lambda: "slots of the layer have other bytes than at the load" in caplog.text)

    assert torch.equal(model.layers[3].weight, replaced)
    assert not checked.has(REPAIRED)


def test_tensor_that_is_no_part_of_a_record_is_reported_and_left(
    model: Model, kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checked = Checked(model, kept, monkeypatch)
    model.layers[5].alpha[0] = 99.0

    checked.until(lambda: "alpha is no part of its record" in caplog.text)

    assert [fault.name for fault in checked.check.faults] == ["alpha"]
    assert model.layers[5].alpha[0] == 99.0
