"""The kernels on a GPU at the sizes of DeepSeek-V3, against plain torch in float64.

Needs torch, triton, numpy and pytest only. Outputs are poisoned before each launch, inputs are new
in each, and what serving captures is captured and replayed here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional

from runtime.draws import choose_by_draw
from runtime.memory import RESULTS_AT_ONCE, RecordDigests, digest
from runtime.streams import Completion

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from runtime.kernels.combine import sum_rows
from runtime.kernels.digest import digest_records
from runtime.kernels.gemm import (
    BF16_DECODE,
    BF16_PREFILL,
    Tiling,
    grouped_gemm,
    grouped_gemm_fp8,
)
from runtime.kernels.quantise import Quantised, quantise_rows, silu_times_up, silu_times_up_fp8
from runtime.kernels.replicas import choose_replicas
from runtime.model.expert_times import captured

pytestmark = pytest.mark.gpu
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, MAX_REPLICAS = 7168, 2048, 256, 8, 8
SIZES = pytest.mark.parametrize(
    ("outputs", "inputs"), [(2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
)
TILINGS = pytest.mark.parametrize("tiling", [BF16_DECODE, BF16_PREFILL], ids=["decode", "prefill"])
POISON = 77.0
Weights = torch.Tensor | Quantised  # [C, N, K]
Counts = Callable[[], torch.Tensor]
Layout = Callable[[torch.Tensor], tuple[torch.Tensor, int]]


@pytest.fixture(autouse=True)
def _seeded_on_the_gpu() -> Iterator[None]:
    torch.manual_seed(5)
    with torch.device("cuda"):
        yield
    torch.cuda.empty_cache()


def at_borders() -> torch.Tensor:
    """On both sides of where another tile is taken, and of where a tile is full."""
    return torch.tensor([0, 1, 16, 17, 32, 33, 64, 65, 0, 128, 129, 192, 193], dtype=torch.int32)


def on_one_slot() -> torch.Tensor:
    return torch.tensor([0, 0, 500, 0], dtype=torch.int32)


def uneven() -> torch.Tensor:
    return uneven_counts(8, 300)


def few() -> torch.Tensor:
    return uneven_counts(8, 16)


def none() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int32)


COUNTS = pytest.mark.parametrize("make", [at_borders, on_one_slot, uneven, few, none])


def uneven_counts(num_slots: int, most: int) -> torch.Tensor:
    """Among other counts: none, one, and ``most``."""
    counts = torch.randint(0, most + 1, (num_slots,), dtype=torch.int32)
    counts[:4] = torch.tensor([0, 1, most, 0], dtype=torch.int32)
    return counts[torch.randperm(num_slots)]


def grouped(counts: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(starts, rows in all) of rows one slot after another."""
    ends = counts.cumsum(0, dtype=torch.int32)
    return ends - counts, int(ends[-1])


def padded(counts: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(starts, rows in all) with as many places for each slot as the busiest has rows."""
    places = int(counts.max())
    return torch.arange(len(counts), dtype=torch.int32) * places, len(counts) * places


LAYOUTS = pytest.mark.parametrize("layout", [grouped, padded])


def slot_of_row(starts: torch.Tensor, counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    row = torch.arange(num_rows)[:, None]
    held = (row >= starts) & (row < starts + counts)
    return torch.where(held.any(1), held.to(torch.int64).argmax(1), -1)


def block_scaled(weights: Quantised) -> torch.Tensor:
    scales = weights.scales.double().repeat_interleave(128, -1).repeat_interleave(128, -2)
    return weights.values.double() * scales


def row_scaled(rows: Quantised) -> torch.Tensor:
    return rows.values.double() * rows.scales.double().repeat_interleave(128, -1)


def worst_error(
    out: torch.Tensor, rows: torch.Tensor, slot: torch.Tensor, weights: object
) -> float:
    """Largest error over what BF16 and a re-ordered sum allow; poison must have stayed."""
    assert bool((out[slot < 0] == POISON).all()), "a row of no slot was written"
    worst = 0.0
    for number in slot[slot >= 0].unique().tolist():
        if isinstance(weights, Quantised):
            weight = block_scaled(Quantised(weights.values[number], weights.scales[number]))
        else:
            weight = weights[number].double()
        wanted = rows[slot == number].double() @ weight.T
        allowed = wanted.abs() / 2**8 + 2e-3 * wanted.square().mean().sqrt()
        worst = max(worst, float(((out[slot == number].double() - wanted).abs() / allowed).max()))
    return worst


def bf16_slots(num_slots: int, outputs: int, inputs: int) -> torch.Tensor:
    """Weights [C, N, K] inside of larger records, as an arena holds them."""
    size = outputs * inputs
    arena = torch.empty((num_slots, size + 4096), dtype=BF16).normal_()
    return arena[:, :size].view(num_slots, outputs, inputs)


def fp8_slots(num_slots: int, outputs: int, inputs: int) -> Quantised:
    """FP8 weights and their block scales, in records of bytes."""
    size, blocks = outputs * inputs, (outputs // 128, inputs // 128)
    scale_bytes = 4 * blocks[0] * blocks[1]
    arena = torch.zeros((num_slots, -(-(size + scale_bytes) // 4096) * 4096), dtype=torch.uint8)
    values = arena[:, :size].view(FP8).view(num_slots, outputs, inputs)
    scales = arena[:, size : size + scale_bytes].view(torch.float32).view(num_slots, *blocks)
    for slot in range(num_slots):
        values[slot].copy_(torch.randn(outputs, inputs))
    scales.copy_(torch.rand(scales.shape) + 0.5)
    return Quantised(values, scales)


def fp8_rows(num_rows: int, columns: int) -> Quantised:
    scales = torch.rand((columns // 128, num_rows)).T + 0.5  # column by column, as DeepEP gives
    return Quantised(torch.randn((num_rows, columns)).to(FP8), scales)


def table() -> tuple[torch.Tensor, torch.Tensor]:
    slots = torch.randint(0, 288, (EXPERTS, MAX_REPLICAS), dtype=torch.int32)
    cumulative = torch.randint(0, 65537, (EXPERTS, MAX_REPLICAS), dtype=torch.int32).sort(1).values
    cumulative[:, -1] = 65536
    return slots, cumulative.contiguous()


@pytest.mark.parametrize("num_tokens", [1, 128, 4096])
def test_replicas_are_chosen_as_on_a_cpu(num_tokens: int) -> None:
    slots, cumulative = table()
    experts = torch.randint(-1, EXPERTS, (num_tokens, TOP_K))
    for number in (0, -5, 2**40 + 1):
        seed, out = torch.tensor([number]), torch.full_like(experts, 99)
        strays = torch.zeros(1, dtype=torch.int32)
        choose_replicas(slots, cumulative, experts, seed, out, strays)
        on_cpu = choose_by_draw(slots.cpu(), cumulative.cpu(), experts.cpu(), seed.cpu())
        assert torch.equal(out.cpu(), on_cpu)


def test_ids_of_no_expert_are_dropped_and_counted() -> None:
    slots, cumulative = table()
    experts = torch.randint(0, EXPERTS, (4096, TOP_K))
    experts[::100, 3] = EXPERTS
    out, strays = torch.full_like(experts, 99), torch.zeros(1, dtype=torch.int32)

    choose_replicas(slots, cumulative, experts, torch.tensor([1]), out, strays)

    assert (out == -1).sum() == strays == 41
    assert (out[::100, 3] == -1).all()


def test_replayed_choice_reads_the_seed_and_the_table_of_its_step() -> None:
    slots, cumulative = table()
    experts, seed = torch.randint(-1, EXPERTS, (128, TOP_K)), torch.tensor([0])
    out, strays = torch.empty_like(experts), torch.zeros(1, dtype=torch.int32)
    graph = captured(lambda: choose_replicas(slots, cumulative, experts, seed, out, strays))

    for step in range(20):
        new_slots, new_cumulative = table()
        slots.copy_(new_slots)
        cumulative.copy_(new_cumulative)
        experts.random_(-1, EXPERTS)
        seed.add_(1)
        out.fill_(99)
        graph.replay()
        assert torch.equal(out, choose_by_draw(slots, cumulative, experts, seed)), f"step {step}"


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [5, 3, 1], [4]])
def test_digests_are_those_of_the_bytes_that_came_before_them(order: list[int]) -> None:
    arena = torch.zeros((6, 8192), dtype=torch.uint8)
    records, copies = RecordDigests(), torch.cuda.Stream()
    # More turns than places are made at once, and again in places that were read.
    for turn in range(2 * RESULTS_AT_ONCE + 2):
        made = torch.randint(0, 256, arena.shape, dtype=torch.uint8)
        torch.cuda.synchronize()
        with torch.cuda.stream(copies):
            torch.cuda._sleep(10_000)  # a digest that did not wait would see the bytes before
            arena.copy_(made)
            landed = Completion(is_cuda=True)
        pending = records.order([arena[number] for number in order], [landed])
        torch.cuda.synchronize()

        expected = [tuple(row) for row in digests(made[order]).tolist()]
        assert records.read(pending) == expected, f"turn {turn}"


def digests(records: torch.Tensor) -> torch.Tensor:
    return torch.tensor([digest(record.cpu()) for record in records])


def test_digests_depend_on_every_byte_of_records_in_an_arena() -> None:
    size = 44_040_192 + 12_288  # one FP8 expert of DeepSeek-V3, and its scales, in whole pages
    arena = torch.randint(0, 256, (4, size + 4096), dtype=torch.uint8)
    records, out = arena[:, :size], torch.full((4, 2), 5)
    graph = captured(lambda: digest_records(records, out))

    for byte in (0, size // 2 + 1, size - 1):
        arena[2, byte] ^= 1
        before = out.clone()
        graph.replay()
        assert torch.equal(out, digests(records.contiguous()))
        assert (out != before).any(1).tolist() == [False, False, True, False]


@SIZES
@LAYOUTS
@COUNTS
@TILINGS
def test_bf16_products(
    outputs: int, inputs: int, layout: Layout, make: Counts, tiling: Tiling
) -> None:
    counts = make()
    starts, num_rows = layout(counts)
    weights, rows = (
        bf16_slots(len(counts), outputs, inputs),
        torch.randn((num_rows, inputs), dtype=BF16),
    )
    slot = slot_of_row(starts, counts, num_rows)
    rows[slot < 0] = float("nan")
    out = torch.full((num_rows, outputs), POISON, dtype=BF16)

    grouped_gemm(rows, weights, starts, counts, out, tiling=tiling)

    assert worst_error(out, rows, slot, weights) <= 1


@SIZES
@LAYOUTS
@COUNTS
def test_fp8_products(outputs: int, inputs: int, layout: Layout, make: Counts) -> None:
    counts = make()
    starts, num_rows = layout(counts)
    weights, rows = fp8_slots(len(counts), outputs, inputs), fp8_rows(num_rows, inputs)
    out = torch.full((num_rows, outputs), POISON, dtype=BF16)
    slot = slot_of_row(starts, counts, num_rows)

    grouped_gemm_fp8(rows, weights, starts, counts, out)

    assert worst_error(out, row_scaled(rows), slot, weights) <= 1


def test_fp8_rows_as_deepep_s_low_latency_mode_gives_them() -> None:
    counts = uneven_counts(8, 64)
    starts, num_rows = padded(counts)
    weights, rows = fp8_slots(8, 4096, HIDDEN), fp8_rows(num_rows, HIDDEN)
    by_slot = rows.scales.reshape(8, 64, HIDDEN // 128).mT.contiguous().mT
    out = torch.full((num_rows, 4096), POISON, dtype=BF16)

    grouped_gemm_fp8(rows._replace(scales=by_slot), weights, starts, counts, out)

    slot = slot_of_row(starts, counts, num_rows)
    assert worst_error(out, row_scaled(rows), slot, weights) <= 1


def test_slots_past_two_thousand_million_elements_are_reached() -> None:
    counts = uneven_counts(80, 16)
    starts, num_rows = grouped(counts)
    weights = bf16_slots(80, 4096, HIDDEN)
    rows = torch.randn((num_rows, HIDDEN), dtype=BF16)
    out = torch.full((num_rows, 4096), POISON, dtype=BF16)
    assert weights.stride(0) * 79 > 2**31

    grouped_gemm(rows, weights, starts, counts, out)

    assert worst_error(out, rows, slot_of_row(starts, counts, num_rows), weights) <= 1


def test_expert_gives_the_same_bits_in_any_slot() -> None:
    weights = fp8_slots(6, 4096, HIDDEN)
    for tensor in weights:
        tensor.view(torch.uint8)[4].copy_(tensor.view(torch.uint8)[1])
    rows = fp8_rows(80, HIDDEN)
    rows.values.view(torch.uint8)[40:].copy_(rows.values.view(torch.uint8)[:40])
    rows.scales[40:] = rows.scales[:40]
    starts = torch.tensor([0, 0, 40, 40, 40, 80], dtype=torch.int32)
    counts = torch.tensor([0, 40, 0, 0, 40, 0], dtype=torch.int32)
    out = torch.full((80, 4096), POISON, dtype=BF16)

    grouped_gemm_fp8(rows, weights, starts, counts, out)

    assert torch.equal(out[:40].view(torch.int16), out[40:].view(torch.int16))


def scales_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.float().abs().unflatten(1, (-1, 128)).amax(2).clamp(min=1e-4) / 448


def check_quantised(found: Quantised, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.scales, scales_of(wanted), rtol=1e-5, atol=0)
    step = wanted.double().abs() / 16 + found.scales.double().repeat_interleave(128, 1) / 1000
    assert bool(((row_scaled(found) - wanted.double()).abs() <= step).all())


def test_rows_are_quantised_to_the_nearest() -> None:
    rows = torch.randn((4096, HIDDEN), dtype=BF16) * torch.rand((4096, 1)).exp2().to(BF16)
    rows[7] = 0
    into = Quantised(
        torch.empty((4096, HIDDEN), dtype=FP8), torch.full((HIDDEN // 128, 4096), POISON).T
    )

    quantise_rows(rows, into)

    check_quantised(into, rows)


def test_results_of_bfloat16_are_weighed_and_summed_in_float32() -> None:
    num_tokens, top_k, columns = 3000, 8, 7168
    place = torch.arange(num_tokens * top_k).view(num_tokens, top_k).flip(0).contiguous()
    place[torch.rand(place.shape) < 0.5] = -1
    results, weights = (
        torch.randn((num_tokens * top_k, columns), dtype=BF16),
        torch.rand(place.shape),
    )
    out = torch.empty((num_tokens, columns), dtype=BF16)

    sum_rows(results, place, weights, out)

    rows = torch.where((place >= 0)[..., None], results[place.clamp(min=0)].float(), 0.0)
    wanted = (rows * weights[..., None]).sum(dim=1)
    torch.testing.assert_close(out.float(), wanted, rtol=2**-8, atol=1e-4)


@LAYOUTS
def test_gates_of_the_slots_rows(layout: Layout) -> None:
    counts = uneven_counts(16, 200)
    starts, num_rows = layout(counts)
    used = slot_of_row(starts, counts, num_rows) >= 0
    gate_up = 2 * torch.randn((num_rows, 2 * INTERMEDIATE), dtype=BF16)
    gate, up = gate_up.float().chunk(2, 1)
    wanted = functional.silu(gate) * up
    out = torch.full((num_rows, INTERMEDIATE), POISON, dtype=BF16)
    into = Quantised(
        torch.full((num_rows, INTERMEDIATE), 64.0).to(FP8),
        torch.full((num_rows, INTERMEDIATE // 128), POISON),
    )

    silu_times_up(gate_up, starts, counts, out)
    silu_times_up_fp8(gate_up, starts, counts, into)

    torch.testing.assert_close(out[used].float(), wanted[used], rtol=2**-8, atol=1e-5)
    assert bool((out[~used] == POISON).all())
    check_quantised(Quantised(into.values[used], into.scales[used]), wanted[used])
    assert bool((into.scales[~used] == POISON).all())
    assert bool((into.values[~used].float() == 64).all())


def test_captured_layer_follows_counts_rows_and_swapped_weights() -> None:
    """Quantise, gate and up, gate, down: replayed with new inputs, nothing allocated."""
    num_slots, places = 16, 256  # so that slots change their tiles between replays
    num_rows = num_slots * places
    starts = torch.arange(num_slots, dtype=torch.int32) * places
    counts = torch.zeros(num_slots, dtype=torch.int32)
    gate_up, down = fp8_slots(num_slots, 4096, HIDDEN), fp8_slots(num_slots, HIDDEN, INTERMEDIATE)
    rows = torch.zeros((num_rows, HIDDEN), dtype=BF16)
    rows8 = Quantised(torch.empty((num_rows, HIDDEN), dtype=FP8), torch.zeros(num_rows, 56))
    both = torch.zeros((num_rows, 4096), dtype=BF16)
    gated = Quantised(torch.empty((num_rows, INTERMEDIATE), dtype=FP8), torch.zeros(num_rows, 16))
    out = torch.zeros((num_rows, HIDDEN), dtype=BF16)

    def layer() -> None:
        quantise_rows(rows, rows8, starts=starts, counts=counts)
        grouped_gemm_fp8(rows8, gate_up, starts, counts, both)
        silu_times_up_fp8(both, starts, counts, gated)
        grouped_gemm_fp8(gated, down, starts, counts, out)

    graph = captured(layer)
    rows.normal_()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        rows.normal_()
        counts.copy_(uneven_counts(num_slots, places))
        for tensor in gate_up:
            tensor.view(torch.uint8)[3].copy_(tensor.view(torch.uint8)[7])
        both.fill_(POISON)
        out.fill_(POISON)
        graph.replay()
        slot = slot_of_row(starts, counts, num_rows)
        assert worst_error(both, row_scaled(rows8), slot, gate_up) <= 1
        assert worst_error(out, row_scaled(gated), slot, down) <= 1
        del slot
    assert torch.cuda.memory_allocated() == before
