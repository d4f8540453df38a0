"""Experts on GPUs: right under any placement, bit-equal wherever they lie, steady under graphs."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from runtime.checkpoints.checkpoint import Checkpoint
from runtime.dispatch.all_to_all import Received
from runtime.experts import PeerBank
from runtime.memory import digest
from runtime.model.compute import GroupedExperts
from runtime.model.moe import CapturedStack
from runtime.model.reference import ReferenceModel
from runtime.routing import RoutingTable
from tests.gpu.parts import (
    LIMIT,
    MODEL,
    NUM_TOKENS,
    TIE,
    build,
    needs_deep_ep,
    needs_two_gpus,
    random_placement,
    slots_per_rank,
    tokens_of,
    weights_of,
)
from tests.support.launch import launch
from tests.support.limits import NEVER_S

pytestmark = [
    pytest.mark.gpu,
    needs_two_gpus,
    needs_deep_ep,  # a graph captures its low-latency mode alone
]
NUM_RANKS = min(4, torch.cuda.device_count())
weights = pytest.fixture(scope="module")(weights_of)


def run_placements(
    rank: int, num_ranks: int, path: Path, precision: str
) -> tuple[list[float], list[int], float]:
    made = build(rank, num_ranks, path, precision)
    ids, seeds = tokens_of(rank), torch.tensor([11, 12], device=made.device)
    reference = ReferenceModel(MODEL, Checkpoint(path).reference_weights(), tie=TIE[precision])
    errors, wrong, answers = [], [], []
    for seed in range(4):
        made.take_over(random_placement(num_ranks, seed))
        answer = made.stack.forward(ids.to(made.device), salt=seeds)
        answer = type(answer)(answer.hidden.cpu(), answer.experts.cpu())
        found = reference.check(ids, answer)
        errors.append(found.max_error)
        wrong.append(found.wrong_routes)
        answers.append(answer.hidden.float())
    spread = max(float((a - answers[0]).norm() / answers[0].norm()) for a in answers[1:])
    return errors, wrong, spread


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_any_placement_gives_the_reference_s_answer(
    weights: dict[str, Path], precision: str
) -> None:
    for errors, wrong, spread in launch(
        run_placements, NUM_RANKS, weights[precision], precision, deadline_s=NEVER_S
    ):
        print(f"{precision}: errors {errors}, between placements {spread:.2e}")
        assert max(errors) <= LIMIT[precision]
        assert wrong == [0] * 4
        # The same rows through the same kernels: only the order of sums may differ.
        assert spread <= 5e-3


def run_transplant(rank: int, num_ranks: int, path: Path, precision: str) -> list[bool]:
    made = build(rank, num_ranks, path, precision)
    made.take_over(random_placement(num_ranks, 0))
    donor = (rank + 1) % num_ranks
    peer = PeerBank(made.arena.peer(donor), made.bank, slots_per_rank(num_ranks))
    random = torch.Generator().manual_seed(7)
    rows = torch.randn((NUM_TOKENS, MODEL.hidden), generator=random).to(made.device, torch.bfloat16)
    experts = GroupedExperts(made.bank, usual_rows=64)

    def outputs_of(slot: int) -> torch.Tensor:
        counts = torch.zeros(slots_per_rank(num_ranks), dtype=torch.int32, device=made.device)
        counts[slot] = len(rows)
        return experts.run(1, Received(rows, counts, None))

    # What the donor computes with its slot 3, and what this rank computes with that record in
    # its own slot 8.
    theirs = outputs_of(3)
    everyone = [torch.empty_like(theirs) for _ in range(num_ranks)]
    dist.all_gather(everyone, theirs)
    dist.barrier()
    peer.read(1, 3, made.bank.staging(0))
    made.bank.swap(1, 8, 0)
    ours = outputs_of(8)
    bytes_are_right = digest(made.bank.live(1, 8)) == digest(made.bank.staging(0))
    return [torch.equal(ours, everyone[donor]), bytes_are_right, bool(ours.abs().sum() > 0)]


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_transplanted_expert_gives_bit_equal_outputs(
    weights: dict[str, Path], precision: str
) -> None:
    found = launch(run_transplant, NUM_RANKS, weights[precision], precision, deadline_s=NEVER_S)

    assert found == [[True, True, True]] * NUM_RANKS


def run_graph(rank: int, num_ranks: int, path: Path, precision: str) -> list[float]:
    made = build(rank, num_ranks, path, precision)
    made.take_over(random_placement(num_ranks, 0))
    captured = CapturedStack(
        made.stack,
        shape=(2, NUM_TOKENS // 2),
        num_layers=MODEL.num_layers,
        device=made.device,
    )
    made.counter.drain()
    distances, counted = [], 0.0
    for step in range(6):
        if step % 2 == 0:
            made.take_over(random_placement(num_ranks, step))  # between replays, never captured
        ids = tokens_of(rank, step).to(made.device)
        replayed = captured.forward(ids, salt=step).hidden.clone()
        counted += float(made.counter.drain().sum())
        seeds = torch.arange(MODEL.num_layers) * 0x9E3779B1 + step
        eager = made.stack.forward(ids, salt=seeds.to(made.device)).hidden
        made.counter.drain()
        distances.append(float((replayed - eager).float().norm() / eager.float().norm()))
    total = torch.tensor(counted, device=made.device)
    dist.all_reduce(total)
    return [*distances, float(total), float(captured.num_captures)]


def run_forgotten(rank: int, num_ranks: int, path: Path) -> float:
    made = build(rank, num_ranks, path, "bfloat16")
    made.take_over(random_placement(num_ranks, 0))
    captured = CapturedStack(
        made.stack,
        shape=(2, NUM_TOKENS // 2),
        num_layers=MODEL.num_layers,
        device=made.device,
    )
    ids = tokens_of(rank)
    seeds = (torch.arange(MODEL.num_layers) * 0x9E3779B1 + 9).to(made.device)
    expected = made.stack.forward(ids.to(made.device), salt=seeds).hidden.clone()
    made.stack = None  # type: ignore[assignment]
    gc.collect()
    poison = [torch.full((2048, n), 3.0, device=made.device) for n in (32, 2048, 4096, 6144) * 8]
    replayed = captured.forward(ids, salt=9).hidden
    distance = float((replayed - expected).float().norm() / expected.float().norm())
    return distance if len(poison) == 32 else -1.0


def test_graph_keeps_alive_what_it_reads(weights: dict[str, Path]) -> None:
    found = launch(run_forgotten, NUM_RANKS, weights["bfloat16"], deadline_s=NEVER_S)

    assert max(found) <= 5e-3


def run_alike(rank: int, num_ranks: int, path: Path) -> tuple[bool, bool, bool]:
    made = build(rank, num_ranks, path, "bfloat16")
    random = torch.Generator().manual_seed(1)  # the same tokens everywhere, as on a TP group
    experts = torch.randint(MODEL.num_experts, (NUM_TOKENS, MODEL.top_k), generator=random)
    on_cpu = RoutingTable(random_placement(num_ranks, 0), max_replicas=num_ranks)
    seed = torch.tensor([12345])
    drawn = made.table.draw(1, experts.to(made.device), seed.to(made.device))
    even = made.table.choose(1, experts.to(made.device), salt=12345)
    salted = made.table.draw(1, experts.to(made.device), seed.to(made.device) + rank)
    everyone = [torch.empty_like(salted) for _ in range(num_ranks)]
    dist.all_gather(everyone, salted)
    return (
        torch.equal(drawn.cpu(), on_cpu.draw(1, experts, seed)),
        torch.equal(even.cpu(), on_cpu.choose(1, experts, salt=12345)),
        all(not torch.equal(everyone[0], other) for other in everyone[1:]),
    )


def test_ranks_with_one_seed_choose_alike_and_with_their_own_they_do_not(
    weights: dict[str, Path],
) -> None:
    found = launch(run_alike, NUM_RANKS, weights["bfloat16"], deadline_s=NEVER_S)

    # Alike with the CPU's choice is alike with each other.
    assert found == [(True, True, True)] * NUM_RANKS


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_replays_follow_swaps_without_a_new_capture(
    weights: dict[str, Path], precision: str
) -> None:
    for found in launch(run_graph, NUM_RANKS, weights[precision], precision, deadline_s=NEVER_S):
        *distances, total, captures = found
        assert max(distances) <= 5e-3
        assert total == NUM_RANKS * 6 * NUM_TOKENS * MODEL.top_k * MODEL.num_layers
        assert captures == 1
