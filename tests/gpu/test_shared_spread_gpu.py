"""The shared expert in extra slots on a GPU: slots in a graph, and products of its weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eplb.core.placement import EMPTY
from eplb.core.topology import Topology
from eplb.shares.shared_expert import split_shared

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from runtime.batch_split import BatchSplit
from runtime.checkpoints.own_model import quantise_blocks, scale_blocks
from runtime.dispatch.all_to_all import Received
from runtime.experts import ExpertBank, ExpertSchema, PlainArena, bank_bytes
from runtime.model.compute import GroupedExperts, SlotWeights, swiglu
from runtime.routing import RoutingTable
from runtime.shared_spread import SharedSpread
from tests.gpu.test_batch_split_gpu import EXPERTS, TOKENS, TOP_K, popularity, random_placement

pytestmark = pytest.mark.gpu
LIMIT = {"bf16": 2e-2, "fp8": 5e-2}  # relative error of the activations' precision
HIDDEN, INTERMEDIATE, SHARED = 512, 256, 384


@pytest.mark.parametrize("num_ranks", [1, 8, 32, 144])
def test_graph_sends_shared_tokens_as_the_reference_token_by_token(num_ranks: int) -> None:
    num_slots = 288
    topology = Topology.uniform(1, num_ranks, num_slots // num_ranks)
    placements = [random_placement(topology, seed) for seed in (1, 2)]
    table = RoutingTable(
        placements[0],
        max_replicas=num_slots - EXPERTS + 1,
        device="cuda",
        topology=topology,
        extra_slots=1,
    )
    others = torch.zeros((num_ranks, EXPERTS), dtype=torch.int32, device="cuda")
    source = num_ranks // 2

    def exchange(counts: torch.Tensor, gathered: torch.Tensor) -> None:
        gathered.copy_(others)
        gathered[source].copy_(counts)

    split = BatchSplit(
        table, exchange, source=source, num_sources=num_ranks, max_pairs=TOKENS * TOP_K
    )
    spread = SharedSpread(table, split, top_k=TOP_K, least=16)
    experts = torch.zeros((TOKENS, TOP_K), dtype=torch.int64, device="cuda")
    weights = torch.rand((TOKENS, TOP_K), device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        slots = split.slots(0, experts)
        return slots, *spread.append(0, experts, slots, weights)

    step()  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed, slots, columns = step()

    rng, num_moved = np.random.default_rng(num_ranks), 0
    shared_slot = table.extra_slot(0)
    for number in range(6):
        if number == 3:
            table.load(placements[1], [0])
        batch = rng.choice(EXPERTS, (TOKENS, TOP_K), p=popularity())
        batch[number::5] = EMPTY
        sizes = rng.integers(0, TOKENS, num_ranks) * TOP_K
        counts = np.stack([rng.multinomial(size, popularity()) for size in sizes])
        counts[source] = np.bincount(batch[batch >= 0], minlength=EXPERTS)
        experts.copy_(torch.from_numpy(batch))
        others.copy_(torch.from_numpy(counts))
        graph.replay()

        ranks = spread.ranks
        assert ranks.tokens.tolist() == (-(-counts.sum(axis=1) // TOP_K)).tolist()
        assert ranks.takes.all()
        assert float(ranks.load.sum()) == pytest.approx(counts.sum(), rel=1e-5)
        wanted = split_shared(
            ranks.load.cpu().numpy(),
            ranks.tokens.cpu().numpy(),
            np.ones(num_ranks, bool),
            least=16,
        )
        is_real = (batch >= 0).any(axis=1)
        rank = wanted.targets(source, np.cumsum(is_real) - 1, int(is_real.sum()))
        expected = np.where(is_real, shared_slot[rank], EMPTY)
        assert slots[:, -1].tolist() == expected.tolist()
        num_moved += int(wanted.taken.sum())
        assert torch.equal(slots[:, :-1], routed)
        assert torch.equal(columns[:, :-1], weights)
        assert (columns[:, -1] == 1).all()
    assert (num_moved > 0) == (num_ranks > 1)


def filled(schema: ExpertSchema, num_slots: int) -> tuple[SlotWeights, list[torch.Tensor]]:
    """Weights of slots in a schema's types, and what they stand for in float32."""
    stored: dict[str, list[torch.Tensor]] = {}
    plain = []
    for name in [spec.name for spec in schema.tensors if not spec.name.endswith("scale")]:
        shape = next(spec.shape for spec in schema.tensors if spec.name == name)
        made = torch.randn((num_slots, *shape)) * shape[1] ** -0.5
        if f"{name}_scale" in [spec.name for spec in schema.tensors]:
            both = [quantise_blocks(one) for one in made]
            stored[name] = [values for values, _ in both]
            stored[f"{name}_scale"] = [scale for _, scale in both]
            plain.append(torch.stack([scale_blocks(*one) for one in both]))
        else:
            stored[name] = list(made.to(torch.bfloat16))
            plain.append(made.to(torch.bfloat16).float())
    return {name: torch.stack(one).cuda() for name, one in stored.items()}, plain


@pytest.mark.parametrize("layout", ["grouped", "padded"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_experts_run_the_shared_slot_with_its_own_weights(precision: str, layout: str) -> None:
    torch.manual_seed(3)
    is_fp8 = precision == "fp8"

    def schema_of(intermediate: int) -> ExpertSchema:
        if is_fp8:
            return ExpertSchema.swiglu_fp8(HIDDEN, intermediate)
        return ExpertSchema.swiglu(HIDDEN, intermediate, torch.bfloat16)

    schema = schema_of(INTERMEDIATE)
    arena = PlainArena(bank_bytes(schema, 1, 3, 0), torch.device("cuda"))
    bank = ExpertBank(schema, 1, 3, num_staging=0, arena=arena)
    routed, plain = filled(schema, 3)
    for name, tensor in bank.weights(0).items():
        tensor.copy_(routed[name])
    shared, wide = filled(schema_of(SHARED), 1)
    experts = GroupedExperts(bank, usual_rows=32, shared=[shared])
    counts = [40, 0, 7, 130]
    rows = torch.randn((sum(counts), HIDDEN)).to(torch.bfloat16)
    pieces = rows.split(counts)
    given = rows
    if layout == "padded":
        given = torch.full((4, 144, HIDDEN), float("nan"), dtype=torch.bfloat16)
        for slot, piece in enumerate(pieces):
            given[slot, : len(piece)] = piece
    received = Received(given.cuda(), torch.tensor(counts, device="cuda"), None)

    results = experts.run(0, received).cpu().float()

    assert results.shape == given.shape
    found = results.split(counts) if layout == "grouped" else results
    for slot, piece in enumerate(pieces):
        weights = (wide[0][0], wide[1][0]) if slot == 3 else (plain[0][slot], plain[1][slot])
        expected = swiglu(piece.float(), *weights)
        error = (found[slot][: len(piece)] - expected).norm()
        assert float(error) <= LIMIT[precision] * float(expected.norm())
