"""The shared expert in slots of light ranks: right outputs, whatever the batch and the counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from scipy.optimize import linprog

from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from runtime.batch.counts import Exchange, all_gather_counts
from runtime.batch.shared_expert import SharedSpread
from runtime.batch.shared_rule import LEAST, SharedSplit, split_shared
from runtime.batch.split import BatchSplit
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.own_model import expert_name, layer_name
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher
from runtime.experts import ExpertBank, ExpertSchema
from runtime.model.compute import LoopExperts, swiglu
from runtime.model.moe import MoELayer, MoEStack
from runtime.model.reference import ReferenceModel
from runtime.routing import RoutingTable

RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]

# Three ranks of four slots, eight experts: 0 and 1 are on ranks 0 and 1, 7 on rank 2 alone.
THREE = Topology.uniform(num_nodes=1, ranks_per_node=3, slots_per_rank=4)
HELD = Placement(np.array([[0, 1, 2, 3, 0, 1, 4, 5, 6, 7, EMPTY, EMPTY]] * 2), num_experts=8)
DRAINED = Placement(np.array([[0, 1, 2, 3, 4, 5, 6, 7, *[EMPTY] * 4]] * 2), num_experts=8)
TOP_K, TOKENS = 2, 24


@dataclass
class Rank:
    layers: list[MoELayer]
    stack: MoEStack
    counter: SlotCounter

    def received(self) -> tuple[int, list[int]]:
        """Rows of routed experts of all layers, and of the shared expert in each layer."""
        counts = self.counter.drain()
        return int(counts[:, :-1].sum()), counts[:, -1].tolist()


@dataclass(frozen=True)
class Small:
    """A small model, and how to make a rank that serves it."""

    model: ModelShape
    schema: ExpertSchema
    checkpoint: Checkpoint

    def rank(
        self, rank: int, topology: Topology, placement: Placement, exchange: Exchange | None = None
    ) -> Rank:
        group, layers = dist.group.WORLD, range(self.model.num_layers)
        assert group is not None
        mine = topology.slots_on(rank)
        bank = ExpertBank(self.schema, len(layers), mine.stop - mine.start, num_staging=0)
        for layer, held in enumerate(placement.slot_to_expert[:, mine].tolist()):
            for slot, expert in enumerate(held):
                if expert != EMPTY:
                    self.checkpoint.repack(layer, expert, self.schema, bank.live(layer, slot))
        table = RoutingTable(
            placement, max_replicas=topology.num_ranks, topology=topology, extra_slots=1
        )
        split = BatchSplit(
            table,
            exchange or all_gather_counts(group),
            source=rank,
            num_sources=topology.num_ranks,
            max_pairs=TOKENS * TOP_K,
        )
        spread = SharedSpread(table, split, top_k=TOP_K, least=1)
        counter = SlotCounter(len(layers), bank.num_slots + 1)
        dispatcher = AllToAllDispatcher(topology.widened(1), group, rank, counter)
        dense = self.checkpoint.dense_weights()
        experts = LoopExperts(bank, shared=[self.shared(layer) for layer in layers])
        made = [
            MoELayer(layer, TOP_K, experts, table, dispatcher, split=split, spread=spread)
            for layer in layers
        ]
        return Rank(made, MoEStack(self.model, dense, made), counter)

    def shared(self, layer: int) -> dict[str, torch.Tensor]:
        gate_up, down = self._swiglu(f"{layer_name(layer)}.mlp.shared_experts")
        return {"gate_up": gate_up[None], "down": down[None]}

    def expected(
        self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Outputs of layer 0, token by token; nothing for padding."""
        output = torch.zeros_like(tokens)
        for token, (experts, parts) in enumerate(zip(chosen.tolist(), weights, strict=True)):
            for expert, part in zip(experts, parts, strict=True):
                if expert >= 0:
                    found = swiglu(tokens[token], *self._swiglu(expert_name(0, expert)))
                    output[token] += part * found
            if max(experts) >= 0:
                shared = self._swiglu(f"{layer_name(0)}.mlp.shared_experts")
                output[token] += swiglu(tokens[token], *shared)
        return output

    def _swiglu(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.checkpoint.reference_weights()
        parts = [weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up")]
        return torch.cat(parts), weights[f"{name}.down_proj.weight"]


@pytest.fixture
def small(
    small_model: ModelShape, small_schema: ExpertSchema, small_checkpoint: Checkpoint
) -> Small:
    return Small(small_model, small_schema, small_checkpoint)


def ids_of(rank: int) -> torch.Tensor:
    return torch.randint(64, (3, 8), generator=torch.Generator().manual_seed(rank))


def forced(*experts: int) -> torch.Tensor:
    return torch.tensor(experts).expand(2, TOKENS, TOP_K)


def error_of(small: Small, rank: Rank, batch: tuple[torch.Tensor, ...]) -> float:
    """Largest difference of a layer's output from the expected one."""
    output = rank.layers[0].forward(*batch, salt=0)
    return float((output - small.expected(*batch)).abs().max()) if len(output) else 0.0


def batch_of(rank: int, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(rank)
    tokens = torch.randn((len(chosen), 16), generator=random)
    return tokens, chosen, torch.rand(chosen.shape, generator=random) + 0.1


def test_spread_model_agrees_with_the_reference_and_moves_tokens(
    run_ranks: RunRanks, small: Small
) -> None:
    def serve(number: int) -> tuple[float, int, int, list[int]]:
        rank = small.rank(number, THREE, HELD)
        reference = ReferenceModel(small.model, small.checkpoint.reference_weights())
        free = reference.check(ids_of(number), rank.stack.forward(ids_of(number), salt=0))
        rank.counter.drain()
        answer = rank.stack.forward(ids_of(number), salt=0, forced=forced(6, 7))
        check = reference.check(ids_of(number), answer, forced=True)
        return max(free.max_error, check.max_error), free.wrong_routes, *rank.received()

    results = run_ranks(3, serve)

    assert max(error for error, *_ in results) <= 1e-5
    assert sum(wrong for _, wrong, *_ in results) == 0
    assert [routed for *_, routed, _ in results] == [0, 0, 2 * 3 * TOKENS * TOP_K]
    # All routed tokens are on rank 2: it gives away all of its shared ones.
    assert [shared for *_, shared in results] == [[36, 36], [36, 36], [0, 0]]


def test_ranks_without_tokens_and_padding_compute_nothing_of_their_own(
    run_ranks: RunRanks, small: Small
) -> None:
    def serve(number: int) -> tuple[float, int, list[int]]:
        rank = small.rank(number, THREE, HELD)
        chosen = torch.tensor([[6, 7]]).repeat(TOKENS, 1)
        chosen[2:5], chosen[9, 0] = EMPTY, EMPTY
        chosen = chosen[: TOKENS if number == 2 else 0]
        return error_of(small, rank, batch_of(number, chosen)), *rank.received()

    results = run_ranks(3, serve)

    assert max(error for error, *_ in results) <= 1e-5
    assert [routed for _, routed, _ in results] == [0, 0, 2 * 20 + 1]
    shared = [shared[0] for *_, shared in results]
    assert sum(shared) == TOKENS - 3  # padding of a whole token alone
    assert min(shared[:2]) >= 10


def test_drained_rank_keeps_its_own_tokens_and_takes_none(
    run_ranks: RunRanks, small: Small
) -> None:
    def serve(number: int) -> tuple[float, int, list[int]]:
        rank = small.rank(number, THREE, DRAINED)
        chosen = torch.tensor([[4, 5]]).expand(TOKENS, TOP_K)
        return error_of(small, rank, batch_of(number, chosen)), *rank.received()

    results = run_ranks(3, serve)

    assert max(error for error, *_ in results) <= 1e-5
    assert [shared[0] for *_, shared in results] == [2 * TOKENS, 0, TOKENS]


def test_one_rank_keeps_every_token(run_ranks: RunRanks, small: Small) -> None:
    alone = Topology.uniform(num_nodes=1, ranks_per_node=1, slots_per_rank=8)
    placement = Placement(np.arange(8)[None].repeat(2, axis=0), num_experts=8)

    def serve(number: int) -> tuple[float, list[int]]:
        rank = small.rank(number, alone, placement)
        reference = ReferenceModel(small.model, small.checkpoint.reference_weights())
        answer = rank.stack.forward(ids_of(number), salt=0)
        return reference.check(ids_of(number), answer).max_error, rank.received()[1]

    ((error, shared),) = run_ranks(1, serve)

    assert error <= 1e-5
    assert shared == [TOKENS, TOKENS]


def test_ranks_that_disagree_on_counts_still_give_right_outputs(
    run_ranks: RunRanks, small: Small
) -> None:
    def serve(number: int) -> tuple[float, list[int]]:
        group = dist.group.WORLD
        assert group is not None
        gather = all_gather_counts(group)

        def exchange(counts: torch.Tensor, gathered: torch.Tensor) -> None:
            gather(counts, gathered)
            gathered[:, number] += 500 * (number + 1)
            gathered[number] //= 2  # its own tokens too: the rest are more than it knows of

        rank = small.rank(number, THREE, HELD, exchange)
        chosen = torch.tensor([[6, 7]]).expand(TOKENS, TOP_K)
        return error_of(small, rank, batch_of(number, chosen)), rank.received()[1]

    results = run_ranks(3, serve)

    assert max(error for error, _ in results) <= 1e-5
    assert sum(shared[0] for _, shared in results) == 3 * TOKENS


def test_spread_without_its_parts_is_refused(run_ranks: RunRanks, small: Small) -> None:
    def refused(number: int) -> list[str]:
        rank = small.rank(number, THREE, HELD)
        layer, found = rank.layers[0], []
        assert layer.split is not None
        plain = RoutingTable(HELD, max_replicas=3, topology=THREE)
        wide = RoutingTable(HELD, max_replicas=3, topology=THREE, extra_slots=1)
        two = BatchSplit(wide, lambda own, to: None, source=0, num_sources=2, max_pairs=1)
        for make in (
            lambda: MoELayer(0, TOP_K, layer.experts, wide, layer.dispatcher, spread=layer.spread),
            lambda: SharedSpread(plain, two, top_k=TOP_K),
            lambda: SharedSpread(wide, two, top_k=TOP_K),
        ):
            with pytest.raises(ConfigError) as error:
                make()
            found.append(str(error.value))
        return found

    (without_split, without_slot, of_two), *_ = run_ranks(3, refused)

    assert "with shared None and split None, expected a split" in without_split
    assert without_slot == "extra slot 0 of a table with 0, expected a lower number"
    assert "found 2 sources of tokens and 3 ranks" in of_two


Floats = NDArray[np.float64]


def load_after(
    load: Floats, tokens: NDArray[np.int64], split: SharedSplit, weight: float
) -> Floats:
    """[R] load once every token of every source has its rank."""
    on_rank = np.zeros(len(load), np.int64)
    for source, count in enumerate(tokens):
        np.add.at(on_rank, split.targets(source, np.arange(count), int(count)), 1)
    assert on_rank.sum() == tokens.sum()
    assert on_rank.tolist() == (split.kept + split.taken).tolist()
    return load + weight * on_rank


def optimum(
    load: Floats, tokens: NDArray[np.int64], takes: NDArray[np.bool_], weight: float
) -> float:
    """Least load of the busiest rank that takes: variables are shared tokens [R] and that load."""
    num_ranks = len(load)
    bound = np.hstack([weight * np.eye(num_ranks), -np.ones((num_ranks, 1))])[takes]
    total = np.append(takes.astype(float), 0.0)[None]
    cost = np.append(np.zeros(num_ranks), 1.0)
    found = linprog(cost, bound, -load[takes], total, [tokens[takes].sum()], method="highs")
    return float(found.fun)


@pytest.mark.parametrize("weight", [1.0, 0.37, 2.0])
@pytest.mark.parametrize("num_ranks", [1, 2, 7, 32, 144])
def test_busiest_rank_is_at_the_optimum_of_the_linear_program(
    num_ranks: int, weight: float
) -> None:
    rng = np.random.default_rng(num_ranks)
    for skew in (0.1, 0.5, 3.0):
        load = rng.gamma(1 / skew, 1000 * skew, num_ranks)
        tokens = rng.integers(0, 400, num_ranks) * (rng.random(num_ranks) > 0.2)
        takes = rng.random(num_ranks) > 0.1
        takes[0] = True
        load[~takes] = 0
        # The weight itself is rounded to a 64th; loads and tokens to one.
        exact = round(weight * 64) / 64

        split = split_shared(load, tokens, takes, weight=weight, least=1)

        after = load_after(load, tokens, split, exact)
        assert after[takes].max() <= optimum(load, tokens, takes, exact) + 2 * max(1.0, exact)
        assert split.taken[~takes].sum() == 0
        assert split.kept[~takes].tolist() == tokens[~takes].tolist()


def test_rank_gives_only_what_is_above_the_level() -> None:
    load = np.array([1000.0, 400.0, 700.0, 300.0])
    tokens = np.array([200, 200, 200, 200])

    split = split_shared(load, tokens, np.ones(4, bool))

    # 1,200 at home, against a mean of 800 and 1,000 routed tokens, which cannot move.
    assert split.kept.tolist() == [0, 200, 200, 200]
    assert split.taken.tolist() == [0, 50, 0, 150]  # 500 and 600 at home: to one level of 650


def test_fewer_tokens_than_the_least_stay_at_home() -> None:
    tokens = np.full(2, 100)
    above = np.array([2.0 * LEAST - 2, 0.0])

    assert split_shared(above, tokens, np.ones(2, bool)).kept.tolist() == [100, 100]
    above[0] += 4
    assert split_shared(above, tokens, np.ones(2, bool)).kept.tolist() == [100 - LEAST - 1, 100]


def test_tokens_beyond_those_that_were_counted_stay_at_home() -> None:
    split = split_shared(np.array([900.0, 0.0]), np.array([100, 0]), np.ones(2, bool))

    assert split.targets(0, np.array([0, 99, 100, 250]), 100).tolist() == [1, 1, 0, 0]
    assert split.targets(1, np.array([0, 7]), 0).tolist() == [1, 1]


def test_batch_without_tokens_and_group_without_serving_ranks_move_nothing() -> None:
    nothing = np.zeros(3, np.int64)

    assert split_shared(np.zeros(3), nothing, np.ones(3, bool)).up_to.tolist() == [0, 0, 0]
    assert split_shared(np.zeros(3), nothing + 5, np.zeros(3, bool)).kept.tolist() == [5, 5, 5]
