"""The MoE layer over real gloo ranks gives the plain reference's answers under any placement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import PlacementError, RankError
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.counters import PassCounter, SlotCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher
from runtime.experts import ExpertBank, ExpertSchema
from runtime.group import first_sentence
from runtime.model.compute import LoopExperts
from runtime.model.moe import MoELayer, MoEStack
from runtime.model.reference import ReferenceModel
from runtime.routing import SHARE_ONE, RoutingTable
from runtime.streams import Completion
from tests.support.limits import NEVER_S

RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]

# Eight experts over two ranks of six and five slots: replicas, an empty slot, uneven ranks.
UNEVEN = Topology(node_of_rank=np.array([0, 0]), slots_of_rank=np.array([6, 5]))
HELD = np.array([[0, 1, 2, 3, 7, EMPTY, 4, 5, 6, 7, 0], [7, 6, 5, 4, 3, 2, 1, 0, 7, 6, 5]])
SHARED_HOT = Placement(HELD, num_experts=8, generation=1)


def _stack(
    rank: int,
    model: ModelShape,
    schema: ExpertSchema,
    checkpoint: Checkpoint,
) -> tuple[MoEStack, SlotCounter]:
    bank = ExpertBank(schema, model.num_layers, int(UNEVEN.slots_of_rank[rank]), num_staging=1)
    for layer, held in enumerate(SHARED_HOT.slot_to_expert[:, UNEVEN.slots_on(rank)].tolist()):
        for slot, expert in enumerate(held):
            if expert != EMPTY:
                checkpoint.repack(layer, expert, schema, bank.live(layer, slot))
    dense = checkpoint.dense_weights()
    table = RoutingTable(SHARED_HOT, max_replicas=2)
    assert dist.group.WORLD is not None
    counter = SlotCounter(model.num_layers, bank.num_slots)
    dispatcher = AllToAllDispatcher(UNEVEN, dist.group.WORLD, rank, counter)
    experts = LoopExperts(bank)
    layers = [
        MoELayer(
            layer,
            model.top_k,
            experts,
            table,
            dispatcher,
            shared_of(dense, layer),
        )
        for layer in range(model.num_layers)
    ]
    return MoEStack(model, dense, layers), counter


def shared_of(dense: dict[str, torch.Tensor], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    name = f"model.layers.{layer}.mlp.shared_experts"
    gate_up = torch.cat([dense[f"{name}.{part}.weight"] for part in ("gate_proj", "up_proj")])
    return gate_up, dense[f"{name}.down_proj.weight"]


def test_two_ranks_agree_with_one_process_and_count_every_token(
    run_ranks: RunRanks,
    small_model: ModelShape,
    small_schema: ExpertSchema,
    small_checkpoint: Checkpoint,
) -> None:
    def serve(rank: int) -> tuple[float, int, list[list[int]]]:
        stack, counter = _stack(rank, small_model, small_schema, small_checkpoint)
        ids = torch.randint(64, (3, 20), generator=torch.Generator().manual_seed(rank))
        answer = stack.forward(ids, salt=rank)
        check = ReferenceModel(small_model, small_checkpoint.reference_weights()).check(ids, answer)
        return check.max_error, check.wrong_routes, counter.drain().tolist()

    results = run_ranks(2, serve)

    assert max(error for error, _, _ in results) <= 1e-5
    assert sum(wrong for _, wrong, _ in results) == 0
    received = np.concatenate([np.array(counts) for _, _, counts in results], axis=1)
    assert received.sum(axis=1).tolist() == [2 * 3 * 20 * 2] * 2  # ranks x tokens x top-2
    assert received[0, 5] == 0  # the empty slot


def test_two_micro_batches_of_one_call_are_one_pass(
    run_ranks: RunRanks,
    small_model: ModelShape,
    small_schema: ExpertSchema,
    small_checkpoint: Checkpoint,
) -> None:
    class Engine(torch.nn.Module):
        """Runs its batch in two halves, as engines do that overlap two micro-batches."""

        def __init__(self, stack: MoEStack) -> None:
            super().__init__()
            self.stack = stack

        def forward(self, ids: torch.Tensor) -> None:
            for half in (ids[:2], ids[2:]):
                self.stack.forward(half, salt=5)

    def serve(rank: int) -> tuple[int, int]:
        stack, counter = _stack(rank, small_model, small_schema, small_checkpoint)
        engine, passes = Engine(stack), PassCounter()
        watch = passes.watch(engine)
        engine(torch.randint(64, (3, 20), generator=torch.Generator().manual_seed(rank)))
        watch.remove()
        return passes.steps, int(counter.drain().sum())

    results = run_ranks(2, serve)

    assert [steps for steps, _ in results] == [1, 1]
    assert sum(counted for _, counted in results) == 2 * 2 * 3 * 20 * 2  # layers, ranks, T, k


def test_rank_without_tokens_still_serves_the_others(
    run_ranks: RunRanks,
    small_model: ModelShape,
    small_schema: ExpertSchema,
    small_checkpoint: Checkpoint,
) -> None:
    def serve(rank: int) -> tuple[float, int]:
        stack, counter = _stack(rank, small_model, small_schema, small_checkpoint)
        # All tokens of rank 0 go to experts 4 and 5, which only rank 1 holds in layer 0.
        ids = torch.arange(8 if rank == 0 else 0).view(1, -1)
        forced = torch.tensor([4, 5]).expand(2, ids.numel(), 2)
        answer = stack.forward(ids, salt=0, forced=forced)
        if rank == 1:
            return 0.0, int(counter.drain()[0].sum())
        reference = ReferenceModel(small_model, small_checkpoint.reference_weights())
        return reference.check(ids, answer, forced=True).max_error, int(counter.drain()[0].sum())

    (error, received_by_0), (_, received_by_1) = run_ranks(2, serve)

    assert error <= 1e-5
    assert (received_by_0, received_by_1) == (0, 16)


def test_padding_goes_nowhere_and_counts_nowhere(
    run_ranks: RunRanks,
    small_model: ModelShape,
    small_schema: ExpertSchema,
    small_checkpoint: Checkpoint,
) -> None:
    def serve(rank: int) -> tuple[int, bool]:
        stack, counter = _stack(rank, small_model, small_schema, small_checkpoint)
        forced = torch.full((2, 4, 2), EMPTY)
        forced[:, :3] = torch.tensor([0, 1])
        stack.forward(torch.arange(4).view(1, 4), salt=0, forced=forced)
        tokens = counter.drain()
        return int(tokens.sum()), bool(counter.drain().any())

    results = run_ranks(2, serve)

    assert sum(received for received, _ in results) == 2 * 2 * 3 * 2  # ranks, layers, tokens, k
    assert not any(left for _, left in results)


def test_replicas_get_their_shares_to_within_one_token() -> None:
    share = np.array([[0.5, 0.25, 0.25, 1.0]])
    table = RoutingTable(Placement(np.array([[0, 0, 0, 1]]), 2, slot_share=share), max_replicas=3)

    slots = table.choose(0, torch.zeros((40, 1), dtype=torch.int64), salt=3)

    counts = torch.bincount(slots.flatten(), minlength=4).tolist()
    assert all(abs(found - fair) <= 1 for found, fair in zip(counts, [20, 10, 10, 0], strict=True))
    assert torch.equal(slots, table.choose(0, torch.zeros((40, 1), dtype=torch.int64), salt=3))


def test_single_tokens_of_many_ranks_do_not_favour_a_replica() -> None:
    table = RoutingTable(Placement(np.array([[0, 0, 1]]), 2), max_replicas=2)
    token = torch.zeros((1, 1), dtype=torch.int64)

    first = sum(int(table.choose(0, token, salt=salt)) == 0 for salt in range(1000))

    assert 440 <= first <= 560  # 500 +- 4 standard deviations


def test_no_draw_falls_past_the_last_replica() -> None:
    # Three thirds sum to less than one in floating point: the last entry is SHARE_ONE by decree.
    table = RoutingTable(Placement(np.array([[0, 0, 0]]), 1), max_replicas=4)

    draws = torch.arange(SHARE_ONE)
    replica = (draws[:, None] >= table.cumulative[0, 0]).sum(dim=1)

    assert torch.bincount(replica, minlength=4).tolist() == [21845, 21846, 21845, 0]


def test_ids_of_no_expert_go_nowhere_and_are_counted() -> None:
    table = RoutingTable(SHARED_HOT, max_replicas=2)
    experts = torch.tensor([[0, 8], [3, -1], [1000, 7]])

    even = table.choose(0, experts, salt=1)
    drawn = table.draw(0, experts, torch.tensor([1]))

    for slots in (even, drawn):
        assert (slots == EMPTY).tolist() == [[False, True], [False, True], [True, False]]
    assert table.strays.tolist() == [4]


def test_table_keeps_its_addresses_through_a_change() -> None:
    table = RoutingTable(Placement(np.array([[0, 1, EMPTY]]), 2), max_replicas=2)
    before = table.slots.data_ptr(), table.cumulative.data_ptr()

    table.load(Placement(np.array([[0, 1, 0]]), 2, generation=1), [0])

    assert (table.slots.data_ptr(), table.cumulative.data_ptr()) == before
    assert table.slots[0].tolist() == [[0, 2], [1, EMPTY]]
    with pytest.raises(PlacementError, match="3 replicas, expected at most 2"):
        table.load(Placement(np.array([[0, 0, 0]]), 1), [0])


class Launches(TorchDispatchMode):
    """Names every operator that would run on the device; views run nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def changed(held: np.ndarray[Any, Any], layers: list[int]) -> Placement:
    turned = held.copy()
    turned[layers] = turned[layers, ::-1]
    return Placement(turned, num_experts=int(held.max()) + 1, generation=2)


@pytest.mark.parametrize(
    ("layers", "launches"),
    [
        (range(58), ["aten::copy_"]),
        (range(3, 9), ["aten::copy_"]),
        ([0, 1, 7], ["aten::copy_"] * 2),
        ([0, 2, 4, 6], ["aten::index_copy_"]),
        ([], []),
    ],
    ids=["all", "adjacent", "two runs", "scattered", "none"],
)
def test_layers_start_to_serve_in_few_launches(layers: Iterable[int], launches: list[str]) -> None:
    held = np.tile(np.arange(16), (58, 1))
    table = RoutingTable(Placement(held, num_experts=16), max_replicas=4)
    target = changed(held, list(layers))
    prepared = table.prepare(target, layers)

    with Launches() as seen:
        table.swap(prepared)

    assert seen.names == launches
    expected = RoutingTable(target, max_replicas=4)
    assert torch.equal(table.slots, expected.slots)
    assert torch.equal(table.cumulative, expected.cumulative)
    assert table.generation == 2


def test_kernel_inputs_of_a_layer_are_contiguous() -> None:
    table = RoutingTable(SHARED_HOT, max_replicas=3)

    assert table.slots[1].is_contiguous()
    assert table.cumulative[1].is_contiguous()


def test_shares_of_the_rank_s_own_node_are_used() -> None:
    near = np.array([[[1.0, 0.0]], [[0.0, 1.0]]])  # each node keeps its tokens to itself
    placement = Placement(np.array([[0, 0]]), 1, source_share=near)
    tokens = torch.zeros((8, 1), dtype=torch.int64)

    for node in (0, 1):
        table = RoutingTable(placement, max_replicas=2, source_node=node)
        assert set(table.choose(0, tokens, salt=1).flatten().tolist()) == {node}


def test_expert_of_another_rank_gives_bit_equal_results(
    small_model: ModelShape, small_schema: ExpertSchema, small_checkpoint: Checkpoint
) -> None:
    here = ExpertBank(small_schema, 1, 1, num_staging=1)
    there = ExpertBank(small_schema, 1, 3, num_staging=1)
    small_checkpoint.repack(1, 6, small_schema, here.live(0, 0))

    there.staging(0).copy_(here.live(0, 0))
    there.swap(0, 2, 0)

    for name in ("gate_up", "down"):
        assert torch.equal(here.weights(0)[name][0], there.weights(0)[name][2])
    assert here.digest(0, 0) == there.digest(0, 2)


def test_library_error_is_reported_without_source_and_advice() -> None:
    said = RuntimeError(
        "[/build/gloo/pair.cc:537] Read error [127.0.0.1]:21421: Connection reset by peer. This is "
        "typically caused by a remote worker hanging."
    )

    assert first_sentence(said) == "Read error [127.0.0.1]:21421: Connection reset by peer"


def test_counter_that_wraps_between_two_samples_gives_the_tokens_between() -> None:
    counter = SlotCounter(num_layers=1, num_slots=3)
    # Slot 0 passes the largest signed number; slot 1 comes back to 0 from the largest unsigned.
    counter.add(0, torch.tensor([2**31 - 4, -4, 0], dtype=torch.int32))
    counter.drain()

    counter.add(0, torch.tensor([10, 10, 10], dtype=torch.int32))

    assert counter.drain().tolist() == [[10, 10, 10]]


class ArrivesAtLook(Completion):
    """Complete at the n-th time that it is asked, as a device that works on."""

    def __init__(self, number: int) -> None:
        super().__init__(is_cuda=False)
        self.left = number

    def is_complete(self) -> bool:
        self.left -= 1
        return self.left <= 0


def test_wait_polls_until_the_device_has_arrived() -> None:
    looks: list[int] = []
    completion = ArrivesAtLook(3)

    assert completion.wait_until(
        time.monotonic() + NEVER_S, poll_s=0.0, between=lambda: looks.append(completion.left)
    )
    assert looks == [2, 1]


def test_wait_past_its_deadline_ends_without_a_pause() -> None:
    assert not ArrivesAtLook(2).wait_until(time.monotonic() - 1, poll_s=3600.0)
    assert ArrivesAtLook(1).wait_until(time.monotonic() - 1)


def test_wait_ends_with_what_the_look_in_between_raises() -> None:
    def refuse() -> None:
        raise RankError("rank 3 died")

    with pytest.raises(RankError, match="rank 3 died"):
        ArrivesAtLook(2).wait_until(time.monotonic() + NEVER_S, between=refuse)
