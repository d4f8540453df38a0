"""The placement check without an engine: what it finds, what it leaves alone, what it costs."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
import torch

from rebalance.engines.common.fsck.check import PART, EngineView, PlacementCheck, agreed, digests_of
from rebalance.engines.common.fsck.rank_check import RankCheck, check_choices
from rebalance.engines.common.fsck.report import BEGUN, Fault

ROWS, RANKS, EACH, EXPERTS = 6, 2, 9, 12
SLOTS = RANKS * EACH


class Experts(torch.nn.Module):
    """Weights, scales and factors of a rank's slots: of each expert other bytes."""

    def __init__(self, row: int, rank: int, held: np.ndarray) -> None:
        super().__init__()
        own = held[rank * EACH : (rank + 1) * EACH]
        self.weight = torch.nn.Parameter(torch.zeros(EACH, 4, 6), requires_grad=False)
        self.register_buffer("scale", torch.zeros(EACH, 3, dtype=torch.float8_e4m3fn))
        self.alpha = torch.zeros(EACH)  # no parameter, as engines keep derived factors
        self.table = torch.zeros(SLOTS)  # of all slots
        self.factor = torch.tensor(2.5)
        self.counts = torch.arange(EACH)  # no weight
        for slot, expert in enumerate(own):
            self.fill(slot, row, int(expert))
        for slot, expert in enumerate(held):
            self.table[slot] = expert + 0.5

    def fill(self, slot: int, row: int, expert: int) -> None:
        salt = 1000.0 * row + expert + 1
        self.weight.data[slot] = torch.arange(24).reshape(4, 6) + 100 * salt
        self.scale[slot] = torch.tensor([salt % 13, expert + 1, 3.0]).to(torch.float8_e4m3fn)
        self.alpha[slot] = salt / 7


class Rank:
    """One rank of an engine that moves ``weight`` and ``scale``; ``maps`` are of all ranks."""

    def __init__(self, rank: int, maps: np.ndarray) -> None:
        self.rank, self.maps = rank, maps
        self.layers = [Experts(row, rank, held) for row, held in enumerate(maps)]
        self.view = EngineView(range(len(maps)), self.layer, lambda row: maps[row], rank, RANKS)

    def layer(self, row: int) -> tuple[Experts, list[torch.Tensor]]:
        layer = self.layers[row]
        return layer, [layer.weight.data.view(EACH, -1), layer.scale]  # a view, as vLLM moves it


def ranks_with(seed: int, rows: int = ROWS) -> list[Rank]:
    random = np.random.default_rng(seed)
    maps = np.stack([random.permutation(np.arange(SLOTS) % EXPERTS) for _ in range(rows)])
    return [Rank(rank, maps) for rank in range(RANKS)]


def checks_of(ranks: list[Rank]) -> tuple[list[PlacementCheck], list[Fault]]:
    references, faults = agreed(ranks[0].view, [digests_of(rank.view) for rank in ranks])
    return [PlacementCheck(rank.view, references, lambda: 0.0, PART) for rank in ranks], faults


def move(ranks: list[Rank], seed: int) -> None:
    """A rebalance that forgets nothing."""
    random = np.random.default_rng(seed)
    for row in range(len(ranks[0].maps)):
        random.shuffle(ranks[0].maps[row])
        for rank in ranks:
            fresh = Experts(row, rank.rank, ranks[0].maps[row])
            for name in ("scale", "alpha", "table"):
                getattr(rank.layers[row], name).copy_(getattr(fresh, name))
            rank.layers[row].weight.data.copy_(fresh.weight.data)


def visited(check: PlacementCheck) -> list[Fault]:
    """What is found when every slot was looked at and judged once."""
    last, faults = check.num_checked + check.num_slots, []
    while check.num_checked < last:
        faults += check.visit(is_idle=True)
    return list(dict.fromkeys(faults))  # a layer's factors are looked at with each slot


def found_by(checks: list[PlacementCheck]) -> set[tuple[str, int, int, str]]:
    faults = [fault for check in checks for fault in visited(check)]
    return {(fault.kind, fault.row, fault.slot, fault.name) for fault in faults}


def test_right_placement_has_no_fault_before_and_after_moves() -> None:
    ranks = ranks_with(1)
    checks, faults = checks_of(ranks)

    assert faults == []
    assert found_by(checks) == set()
    move(ranks, 2)
    assert found_by(checks) == set()
    assert [check.num_checked for check in checks] == [2 * ROWS * EACH] * RANKS


def test_tensors_are_found_once_and_counters_are_left_out() -> None:
    (rank, _) = ranks_with(1, rows=1)
    slots, factors = rank.view.tensors(0)

    assert [one.name for one in slots] == ["weight", "scale", "alpha", "table"]
    assert [name for name, _ in factors] == ["factor"]


@pytest.mark.parametrize("name", ["e_score_correction_bias", "expert_bias", "per_expert_scale"])
def test_tensor_of_the_router_with_a_row_for_each_slot_stays_when_experts_move(name: str) -> None:
    ranks = ranks_with(1)
    for rank in ranks:
        for layer in rank.layers:  # by expert, of a model with as many experts as slots
            layer.register_parameter(name, torch.nn.Parameter(torch.arange(SLOTS) / 7))
    checks, faults = checks_of(ranks)
    move(ranks, 2)

    assert (faults, found_by(checks)) == ([], set())


@pytest.mark.parametrize("name", ["weight", "scale", "alpha", "table"])
def test_every_planted_slot_fault_is_found_with_its_slot(name: str) -> None:
    ranks = ranks_with(3)
    checks, _ = checks_of(ranks)
    move(ranks, 4)
    random = np.random.default_rng(5)
    planted = set()
    for row in random.choice(ROWS, 4, replace=False).tolist():
        rank, slot = int(random.integers(RANKS)), int(random.integers(EACH))
        layer = ranks[rank].layers[row]
        tensor = layer.weight.data if name == "weight" else getattr(layer, name)
        place = slot + rank * EACH if name == "table" else slot
        view = tensor[place].reshape(-1)[:1].view(torch.uint8)
        view[int(random.integers(len(view)))] ^= 1 << int(random.integers(8))
        planted.add(("slot", row, rank * EACH + slot, name))

    assert found_by(checks) == planted


def test_scales_that_stayed_behind_are_found_and_named() -> None:
    ranks = ranks_with(6, rows=2)
    checks, _ = checks_of(ranks)
    kept = ranks[0].layers[1].alpha.clone()
    before = ranks[0].maps[1].copy()
    move(ranks, 7)
    ranks[0].layers[1].alpha.copy_(kept)
    wrong = [slot for slot in range(EACH) if before[slot] != ranks[0].maps[1][slot]]

    faults = visited(checks[0])

    assert [fault.slot for fault in faults] == wrong
    assert f"has the bytes of expert {before[wrong[0]]}, expected" in faults[0].what
    assert str(faults[0]).startswith(f"layer 1 slot {wrong[0]} expert ")


def test_reload_by_the_first_map_after_a_move_is_found_in_every_moved_slot() -> None:
    ranks = ranks_with(8)
    checks, _ = checks_of(ranks)
    first = ranks[0].maps.copy()
    move(ranks, 9)
    for rank in ranks:  # the loader writes each expert where it was at the start
        for row in range(len(rank.layers)):
            fresh = Experts(row, rank.rank, first[row])
            rank.layers[row].weight.data = fresh.weight.data
            rank.layers[row].scale = fresh.scale
            rank.layers[row].alpha = fresh.alpha

    moved = {(row, slot) for row, slot in np.argwhere(first != ranks[0].maps).tolist()}
    assert {(row, slot) for _, row, slot, _ in found_by(checks)} == moved


def test_factor_of_one_rank_is_a_fault_of_loading_and_one_that_changes_later_is_found() -> None:
    ranks = ranks_with(10, rows=3)
    ranks[1].layers[2].factor.fill_(9.0)
    _, (fault,) = checks_of(ranks)
    assert (fault.kind, fault.row, fault.name) == ("factor", 2, "factor")
    assert "ranks [1]" in fault.what

    ranks[1].layers[2].factor.fill_(2.5)
    checks, _ = checks_of(ranks)
    ranks[0].layers[1].factor.fill_(9.0)
    assert found_by(checks) == {("factor", 1, -1, "factor")}


def test_replicas_that_differ_at_the_start_are_found_and_not_judged_later() -> None:
    ranks = ranks_with(12, rows=2)
    held = ranks[0].maps[0]
    expert = int(np.flatnonzero(np.bincount(held) == 2)[0])
    slot = int(np.flatnonzero(held == expert)[1])
    ranks[slot // EACH].layers[0].alpha[slot % EACH] += 1

    checks, faults = checks_of(ranks)

    assert [(one.kind, one.slot, one.name) for one in faults] == [("replicas", slot, "alpha")]
    assert found_by(checks) == set()


def test_rank_without_a_tensor_is_a_fault() -> None:
    ranks = ranks_with(13, rows=1)
    del ranks[1].layers[0].alpha

    _, faults = checks_of(ranks)

    assert [fault.kind for fault in faults] == ["tensors"]
    assert "'alpha'" in faults[0].what


def test_slot_that_moves_between_look_and_judgement_is_not_a_fault() -> None:
    ranks = ranks_with(14, rows=1)
    (check, _), _ = checks_of(ranks)

    assert check.visit(is_idle=True) == []
    move(ranks, 15)
    assert check.visit(is_idle=True) == []
    assert check.num_checked == 1


def test_slot_whose_look_is_forgotten_is_looked_at_next() -> None:
    ranks = ranks_with(14, rows=1)
    (check, _), _ = checks_of(ranks)
    check.visit(is_idle=True)

    check.forget_look()
    ranks[0].layers[0].alpha[0] += 1
    check.visit(is_idle=True)

    assert [(fault.kind, fault.slot) for fault in check.visit(is_idle=True)] == [("slot", 0)]


def test_visits_take_a_thousandth_of_the_time() -> None:
    ranks = ranks_with(16, rows=4)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.5e-3  # of processor time, each time that the check asks
        return now

    references, _ = agreed(ranks[0].view, [digests_of(rank.view) for rank in ranks])
    check = PlacementCheck(ranks[0].view, references, clock, PART)
    spent = 0.0
    for _ in range(5_000):
        now += 0.8  # a pass
        begin, looked = now, check.num_checked
        check.visit(is_idle=False)
        if check.num_checked != looked:
            spent += now - begin
    assert check.num_rounds > 10
    assert spent / now <= 0.001


def test_slow_first_look_does_not_keep_the_next_away() -> None:
    ranks = ranks_with(18, rows=1)
    other = (digests_of(ranks[1].view), "")
    compiling_s = 0.0

    def gather(own: Any) -> list[Any]:
        nonlocal compiling_s
        compiling_s = 0.1  # in the first look, which comes after the digests of the load
        return [own, other]

    def layer(row: int) -> Any:
        nonlocal compiling_s
        ends, compiling_s = time.monotonic() + compiling_s, 0.0
        while time.monotonic() < ends:
            pass
        return ranks[0].layer(row)

    view = EngineView(range(1), layer, lambda row: ranks[0].maps[row], 0, RANKS)
    check = RankCheck("vllm", gather, lambda *_: None)
    check.begin(lambda: view)
    begin = time.monotonic()
    while check.num_checked < 1 and time.monotonic() < begin + 20:
        check.visit(is_idle=True)

    assert check.num_checked == 1


def test_rank_that_cannot_begin_switches_the_check_off_on_all() -> None:
    others = (digests_of(ranks_with(17, rows=1)[0].view), "")
    events: list[tuple[str, dict[str, Any]]] = []
    check = RankCheck("vllm", lambda own: [others, own], lambda *event: events.append(event))

    def fails() -> EngineView:
        raise RuntimeError("no tensors")

    check.begin(fails)
    check.visit(is_idle=True)

    assert events == [(BEGUN, {"reason": "rank 1: RuntimeError: no tensors"})]
    assert check.num_checked == 0


def test_fault_that_is_known_when_the_check_ends_is_over_once_its_layer_was_found_right() -> None:
    ranks = ranks_with(18, rows=1)
    is_readable = True

    def layer(row: int) -> Any:
        if not is_readable:
            raise RuntimeError("the layer has left")
        return ranks[0].layer(row)

    view = EngineView(range(1), layer, lambda row: ranks[0].maps[row], 0, RANKS)
    other = (digests_of(ranks[1].view), "")
    check = RankCheck("vllm", lambda own: [own, other], lambda *_: None)
    check.begin(lambda: view)
    ranks[0].layers[0].weight.data[2] += 1
    while not check.num_wrong:
        check.visit(is_idle=True)
    is_readable = False
    while check.num_checked:  # 0 without a check
        check.visit(is_idle=True)

    check.look_again(0, is_right=False)
    assert check.num_wrong == 1
    check.look_again(0, is_right=True)
    assert check.num_wrong == 0


def test_references_of_digests_that_json_has_carried_are_those_of_the_digests() -> None:
    ranks = ranks_with(17, rows=2)
    own = [digests_of(rank.view) for rank in ranks]

    assert agreed(ranks[0].view, json.loads(json.dumps(own))) == agreed(ranks[0].view, own)


def test_different_choices_are_a_fault_where_ranks_share_tokens() -> None:
    held = np.array([0, 1, 0, 2])
    experts = np.array([[0], [1], [2], [0]])
    mine, other = np.array([[0], [1], [3], [2]]), np.array([[2], [1], [3], [0]])

    (fault,) = check_choices(5, experts, [mine, other], held, is_shared=True)
    assert check_choices(5, experts, [mine, other], held, is_shared=False) == []
    assert "rank 1 differs from rank 0's slot 0 for 2 of 4 choices" in fault.what


def test_choice_of_a_slot_without_the_expert_is_a_fault() -> None:
    held = np.array([0, 1, 0, 2])
    wrong = [np.array([[0], [3]]), np.array([[0], [-1]])]

    faults = check_choices(5, np.array([[0], [1]]), wrong, held, is_shared=False)

    assert [(one.slot, one.expert) for one in faults] == [(3, 1), (-1, 1)]
