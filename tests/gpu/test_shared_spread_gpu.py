"""The shared expert in extra slots on a GPU: slots in a graph, and products of its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from runtime.batch.shared_rule import split_shared

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from runtime.batch.counts import all_gather_counts
from runtime.batch.shared_expert import SharedSpread
from runtime.batch.split import BatchSplit
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.own_model import (
    Weights,
    layer_name,
    quantise_blocks,
    scale_blocks,
    write_random_checkpoint,
)
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import Received
from runtime.dispatch.deepep import DeepEPLowLatency, DeepEPShape
from runtime.experts import ExpertBank, ExpertSchema, PlainArena, bank_bytes
from runtime.model.compute import GroupedExperts, SlotWeights, swiglu
from runtime.model.moe import CapturedStack, MoELayer, MoEStack
from runtime.model.reference import ReferenceModel
from runtime.routing import RoutingTable
from tests.gpu.parts import MODEL, NUM_TOKENS, needs_deep_ep, schema_of
from tests.gpu.test_batch_split_gpu import EXPERTS, TOKENS, TOP_K, popularity, random_placement
from tests.support.launch import launch
from tests.support.limits import NEVER_S

pytestmark = pytest.mark.gpu
LIMIT = {"bf16": 2e-2, "fp8": 8e-2}  # relative error; FP8 activations are rounded twice
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


def experts_with_shared(
    width: int, precision: str
) -> tuple[GroupedExperts, list[torch.Tensor], list[torch.Tensor]]:
    """Three slots and a shared expert; gate and up, and down, of both in float32."""
    torch.manual_seed(3)

    def schema_of_width(intermediate: int) -> ExpertSchema:
        if precision == "fp8":
            return ExpertSchema.swiglu_fp8(HIDDEN, intermediate)
        return ExpertSchema.swiglu(HIDDEN, intermediate, torch.bfloat16)

    schema = schema_of_width(INTERMEDIATE)
    arena = PlainArena(bank_bytes(schema, 1, 3, 0), torch.device("cuda"))
    bank = ExpertBank(schema, 1, 3, num_staging=0, arena=arena)
    routed, plain = filled(schema, 3)
    for name, tensor in bank.weights(0).items():
        tensor.copy_(routed[name])
    shared, wide = filled(schema_of_width(width), 1)
    return GroupedExperts(bank, usual_rows=32, shared=[shared]), plain, wide


def test_shared_slot_of_the_banks_size_adds_no_product() -> None:
    counts = torch.full((4,), 20, device="cuda")
    received = Received(torch.ones((80, HIDDEN), dtype=torch.bfloat16, device="cuda"), counts, None)
    alike, wider = (experts_with_shared(width, "bf16")[0] for width in (INTERMEDIATE, SHARED))
    for experts in (alike, wider):
        experts.run(0, received)  # compiled

    cuda = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=cuda, acc_events=True) as profile:
        alike.run(0, received)
        torch.cuda.synchronize()
        wider.run(0, received)
        torch.cuda.synchronize()

    launched = [one.name for one in profile.events() or () if "grouped_product" in one.name]
    assert len(launched) == 2 + 4


@pytest.mark.parametrize("layout", ["grouped", "padded"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("width", [INTERMEDIATE, SHARED], ids=["one launch", "two launches"])
def test_experts_run_the_shared_slot_with_its_own_weights(
    width: int, precision: str, layout: str
) -> None:
    experts, plain, wide = experts_with_shared(width, precision)
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


SHARING = replace(MODEL, num_shared_experts=2)
LIMIT_OF_MODEL, TIE = {"bfloat16": 3e-2, "fp8": 4e-2}, {"bfloat16": 0.1, "fp8": 0.5}


def shared_name(layer: int) -> str:
    return f"{layer_name(SHARING.layer_ids[layer])}.mlp.shared_experts"


def at_home(dense: Weights, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up, and down, of a layer's shared expert."""
    name = shared_name(layer)
    gate_up = torch.cat([dense[f"{name}.{part}_proj.weight"] for part in ("gate", "up")])
    return gate_up, dense[f"{name}.down_proj.weight"]


def shared_of(dense: Weights, layer: int, precision: str) -> SlotWeights:
    """Weights of the extra slot; in FP8 the dense ones become what the slot holds."""
    name = shared_name(layer)
    both = dict(zip(("gate_up", "down"), at_home(dense, layer), strict=True))
    if precision != "fp8":
        return {part: weight[None] for part, weight in both.items()}
    made: SlotWeights = {}
    for part, weight in both.items():
        values, scale = quantise_blocks(weight.float())
        made[part], made[f"{part}_scale"] = values[None], scale[None]
        both[part].copy_(scale_blocks(values, scale))
    gate, up = both["gate_up"].chunk(2)
    dense[f"{name}.gate_proj.weight"], dense[f"{name}.up_proj.weight"] = gate, up
    return made


def run_captured(
    rank: int, num_ranks: int, path: Path, precision: str, is_spread: bool
) -> list[float]:
    """Errors of replayed steps through DeepEP, and rows that shared and routed slots received."""
    device, group, layers = torch.device("cuda", rank), dist.group.WORLD, SHARING.num_layers
    assert group is not None
    topology = Topology.uniform(1, num_ranks, SHARING.num_experts)
    schema, checkpoint = schema_of(precision), Checkpoint(path)
    arena = PlainArena(bank_bytes(schema, layers, SHARING.num_experts, 0), device)
    bank = ExpertBank(schema, layers, SHARING.num_experts, num_staging=0, arena=arena)
    record = torch.empty(schema.record_bytes, dtype=torch.uint8)
    for layer in range(layers):
        for expert in range(SHARING.num_experts):
            checkpoint.repack(layer, expert, schema, record)
            bank.live(layer, expert).copy_(record)
    placement = Placement(np.tile(np.arange(SHARING.num_experts), (layers, 1)), SHARING.num_experts)
    table = RoutingTable(placement, max_replicas=1, device=device, topology=topology, extra_slots=1)
    split = BatchSplit(
        table,
        all_gather_counts(group),
        source=rank,
        num_sources=num_ranks,
        max_pairs=NUM_TOKENS * SHARING.top_k,
    )
    spread = SharedSpread(table, split, top_k=SHARING.top_k, weight=2.0)
    counter = SlotCounter(layers, bank.num_slots + 1, device)
    shape = DeepEPShape(topology.widened(1), SHARING.hidden, SHARING.top_k + 1, NUM_TOKENS)
    dispatcher = DeepEPLowLatency(shape, group, counter)
    dense = {name: tensor.to(device) for name, tensor in checkpoint.dense_weights().items()}
    shared = [shared_of(dense, layer, precision) for layer in range(layers)]
    experts = GroupedExperts(bank, usual_rows=64, shared=shared)
    made = [
        MoELayer(layer, SHARING.top_k, experts, table, dispatcher, split=split, spread=spread)
        if is_spread
        else MoELayer(layer, SHARING.top_k, experts, table, dispatcher, at_home(dense, layer))
        for layer in range(layers)
    ]
    stack = MoEStack(SHARING, dense, made)
    captured = CapturedStack(stack, shape=(2, NUM_TOKENS // 2), num_layers=layers, device=device)
    known = checkpoint.reference_weights()
    known |= {name: one.float().cpu() for name, one in dense.items() if "shared" in name}
    reference = ReferenceModel(SHARING, known, tie=TIE[precision])
    counter.drain()
    errors = []
    for seed in range(3):
        ids = torch.randint(
            256, (2, NUM_TOKENS // 2), generator=torch.Generator().manual_seed(seed)
        )
        answer = captured.forward(ids, salt=seed)
        answer = type(answer)(answer.hidden.cpu(), answer.experts.cpu())
        found = reference.check(ids, answer)
        errors += [found.max_error, float(found.wrong_routes)]
    counts = counter.drain()
    dispatcher.close()
    return [*errors, float(counts[:, :-1].sum()), float(counts[:, -1].sum())]


@needs_deep_ep
@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
@pytest.mark.parametrize("is_spread", [True, False], ids=["in a slot", "at home"])
def test_captured_model_with_a_shared_expert_gives_the_references_answer(
    tmp_path: Path, is_spread: bool, precision: str
) -> None:
    write_random_checkpoint(tmp_path, SHARING, schema_of(precision), vocabulary=256, seed=5)

    ((*checks, routed, shared),) = launch(
        run_captured, 1, tmp_path, precision, is_spread, deadline_s=NEVER_S
    )

    print(f"{precision}: {checks}")
    assert max(checks[::2]) <= LIMIT_OF_MODEL[precision]
    assert sum(checks[1::2]) == 0
    num_tokens = 3 * SHARING.num_layers * NUM_TOKENS
    assert (routed, shared) == (num_tokens * SHARING.top_k, num_tokens if is_spread else 0)
