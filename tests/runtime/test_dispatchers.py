"""The start-up proof of a dispatcher: the plain one passes it, careless ones do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb.core.topology import Topology
from eplb.errors import BrokenGroup, ConfigError
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher, Received
from runtime.dispatch.deepep import DeepEPShape, normal_bytes
from runtime.dispatch.table import Trial, check_dispatcher, choose_dispatcher

RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]
UNEVEN = Topology(node_of_rank=np.array([0, 0, 0]), slots_of_rank=np.array([3, 2, 4]))
TRIAL = Trial(UNEVEN, hidden=8, top_k=2, num_tokens=12, device=torch.device("cpu"))


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class Careless(AllToAllDispatcher):
    """Drops the last row it received."""

    def combine(self, layer: int, results: torch.Tensor, received: Received) -> torch.Tensor:
        results[-1:] = 0
        return super().combine(layer, results, received)


class Miscounting(AllToAllDispatcher):
    """Counts padding as load: every token is sent somewhere."""

    def dispatch(
        self, layer: int, tokens: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
    ) -> Received:
        kept = torch.where(slots >= 0, weights, 0.0)
        return super().dispatch(layer, tokens, slots.clamp(min=0), kept)


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        (AllToAllDispatcher, ""),
        (Careless, "random: relative error"),
        (Miscounting, "all tokens to one slot: counted"),
    ],
)
def test_self_test_detects_wrong_dispatchers(
    run_ranks: RunRanks, kind: type[AllToAllDispatcher], verdict: str
) -> None:
    def prove(rank: int) -> str:
        counter = SlotCounter(1, int(UNEVEN.slots_of_rank[rank]))
        return check_dispatcher(kind(UNEVEN, group(), rank, counter), counter, TRIAL, group())

    # The first rank's own tokens tell it, unless every rank is right.
    found = run_ranks(3, prove)

    assert any(text.startswith(verdict) for text in found)
    assert verdict != "" or found == ["", "", ""]


def test_all_to_all_is_chosen_with_a_reason_without_deep_ep(
    run_ranks: RunRanks,
) -> None:
    def pick(rank: int) -> tuple[str, str]:
        counter = SlotCounter(1, int(UNEVEN.slots_of_rank[rank]))
        made, why = choose_dispatcher("auto", TRIAL, counter, group(), max_tokens=12)
        return type(made).__name__, why

    for name, why in run_ranks(3, pick):
        assert name == "AllToAllDispatcher"
        assert why.startswith("all_to_all gives right results on 3 ranks")
        assert "deepep_low_latency refused: rank 0: deep_ep cannot be imported" in why


def test_dispatcher_that_was_asked_for_by_name_is_not_replaced(run_ranks: RunRanks) -> None:
    def ask(rank: int) -> str:
        counter = SlotCounter(1, int(UNEVEN.slots_of_rank[rank]))
        said = []
        for name in ("deepep_normal", "fastest"):
            try:
                choose_dispatcher(name, TRIAL, counter, group(), max_tokens=12)
            except ConfigError as exc:
                said.append(str(exc))
        return "\n".join(said)

    for said in run_ranks(3, ask):
        assert "deepep_normal refused: rank 0: deep_ep cannot be imported" in said
        assert "unknown dispatcher 'fastest', expected auto or one of" in said


def test_normal_mode_is_refused_for_more_slots_of_a_rank_than_a_host_serves() -> None:
    shape = DeepEPShape(Topology.uniform(1, 2, 129), hidden=128, top_k=2, max_tokens=8)

    with pytest.raises(ConfigError, match="a rank has 129 slots of a layer, expected at most 128"):
        shape.check_normal(2)
    DeepEPShape(Topology.uniform(1, 2, 128), hidden=128, top_k=2, max_tokens=8).check_normal(2)


@dataclass(frozen=True)
class Config:
    """deep_ep's sizes of normal mode with 12 channels, as csrc/config.hpp of v1.2.1 has them."""

    nvl_tokens: int
    rdma_tokens: int
    row_extra = 8 + 128 * (8 + 4 + 4)  # source, 128 experts with ids and weights, 128 scales

    def get_nvl_buffer_size_hint(self, row_bytes: int, num_ranks: int) -> int:
        domains, peers = max(num_ranks // 8, 1), min(num_ranks, 8)
        row = row_bytes + self.row_extra
        num_bytes = 12 * peers * ((2 * domains + 3) * 4 + self.nvl_tokens * row)
        return -(-num_bytes // 128) * 128

    def get_rdma_buffer_size_hint(self, row_bytes: int, num_ranks: int) -> int:
        assert num_ranks > 8, "a build without NVSHMEM aborts here"
        row = row_bytes + self.row_extra + 16
        num_bytes = 12 * (num_ranks // 8) * 2 * (18 * 4 + self.rdma_tokens * row)
        return -(-num_bytes // 128) * 128


@pytest.mark.parametrize(
    ("num_ranks", "configs", "expected"),
    [
        # As csrc/config.hpp itself gives them, with the settings of get_dispatch_config and
        # get_combine_config for so many ranks.
        (8, [Config(256, 132), Config(256, 132)], (402_851_712, 0)),
        (16, [Config(288, 140), Config(288, 132)], (453_208_704, 110_265_216)),
        (64, [Config(288, 140), Config(288, 140)], (453_213_312, 441_060_864)),
        (128, [Config(560, 128), Config(560, 132)], (881_247_360, 831_716_352)),
        (160, [Config(720, 132), Config(720, 128)], (1_133_031_552, 1_039_645_440)),
    ],
)
def test_normal_mode_has_a_buffer_for_rdma_where_a_group_spans_nvlink_domains(
    num_ranks: int, configs: list[Config], expected: tuple[int, int]
) -> None:
    assert normal_bytes(configs, 2 * 7168, num_ranks) == expected


def test_normal_mode_is_refused_where_a_buffer_is_larger_than_deep_ep_addresses() -> None:
    with pytest.raises(ConfigError, match=r"on 160 ranks needs .* expected at most 2147483647"):
        normal_bytes([Config(720, 132)], 2 * 16_384, 160)


def test_group_of_survivors_exchanges_tokens_by_the_numbers_of_all_ranks(
    run_ranks: RunRanks,
) -> None:
    """Three of four ranks are left: 0, 2 and 3. Slots 3 and 4 were the dead one's."""
    alive = np.array([True, False, True, True])
    left = Topology(np.zeros(4), slots_of_rank=np.array([3, 2, 1, 2]), alive=alive)
    slots = torch.tensor([[0, 5], [7, 6], [-1, 2], [5, 7]])

    def exchange(place: int) -> tuple[list[int], bool]:
        rank = (0, 2, 3)[place]
        counter = SlotCounter(1, int(left.slots_of_rank[rank]))
        dispatcher = AllToAllDispatcher(left, group(), rank, counter)
        tokens = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
        weights = torch.full(slots.shape, 0.5)
        received = dispatcher.dispatch(0, tokens, slots, weights)
        answer = dispatcher.combine(0, received.rows, received)
        parts = 0.5 * (slots >= 0).sum(dim=1, keepdim=True)
        return counter.drain()[0].tolist(), torch.allclose(answer, parts * tokens)

    assert run_ranks(3, exchange) == [([3, 0, 3], True), ([6], True), ([3, 6], True)]


def test_dispatcher_is_chosen_where_a_rank_before_the_group_is_not_alive(
    run_ranks: RunRanks,
) -> None:
    alive = np.array([False, True, True])
    topology = Topology(UNEVEN.node_of_rank, UNEVEN.slots_of_rank, alive=alive)
    trial = replace(TRIAL, topology=topology)

    def pick(place: int) -> str:
        counter = SlotCounter(1, int(topology.slots_of_rank[place + 1]))
        return choose_dispatcher("all_to_all", trial, counter, group(), max_tokens=12)[1]

    assert run_ranks(2, pick) == ["all_to_all gives right results on 2 ranks"] * 2


def test_deep_ep_is_refused_for_a_group_without_some_ranks_of_the_topology(
    run_ranks: RunRanks,
) -> None:
    topology = replace(Topology.uniform(1, 3, 4), alive=np.array([True, True, False]))

    def check(_: int) -> str:
        with pytest.raises(ConfigError) as caught:
            DeepEPShape(topology, hidden=128, top_k=2, max_tokens=8).check(group())
        return str(caught.value)

    for said in run_ranks(2, check):
        assert said.startswith("2 of 3 ranks are alive, expected all")


def test_broken_exchange_names_the_rank_and_the_layer(run_ranks: RunRanks) -> None:
    def lose(rank: int) -> str:
        counter = SlotCounter(4, 2)
        dispatcher = AllToAllDispatcher(Topology.uniform(1, 2, 2), group(), rank, counter)
        if rank == 1:
            return ""  # its process ends
        with pytest.raises(BrokenGroup) as caught:
            dispatcher.dispatch(3, torch.ones(1, 8), torch.tensor([[3]]), torch.ones(1, 1))
        return str(caught.value)

    said = run_ranks(2, lose)[0]

    expected = "rank 0: the counts exchange of layer 3 failed, a peer is dead or late: "
    assert said.startswith(expected)
