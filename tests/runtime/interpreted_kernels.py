"""The GPU's kernels against plain torch in float64, run by triton's interpreter on small tensors.

``test_kernels.py`` runs this file in a process with TRITON_INTERPRET=1. The interpreter cuts off
where a GPU rounds, hence the wide tolerances; ``gpu/test_kernels_gpu.py`` has the narrow ones.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from runtime.draws import choose_by_draw
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
from runtime.memory import digest

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
POISON = 77.0
COUNTS = (5, 0, 70, 20)  # three tiles of FP8 and decode: few, none, more than one tile, some
GAPS = (0, 2, 2, 9)  # unused rows before each slot's


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


Layout = Callable[[], tuple[torch.Tensor, torch.Tensor, int]]


def grouped() -> tuple[torch.Tensor, torch.Tensor, int]:
    """(starts, counts, number of rows): slots one after another, with gaps."""
    starts, place = [], 0
    for gap, count in zip(GAPS, COUNTS, strict=True):
        starts.append(place + gap)
        place += gap + count
    return int32(*starts), int32(*COUNTS), place + 3


def padded() -> tuple[torch.Tensor, torch.Tensor, int]:
    """The same for slots of 80 places each."""
    return int32(0, 80, 160, 240), int32(*COUNTS), 320


LAYOUTS = pytest.mark.parametrize("layout", [grouped, padded], ids=["grouped", "padded"])
TILINGS = pytest.mark.parametrize("tiling", [BF16_DECODE, BF16_PREFILL], ids=["decode", "prefill"])


def slot_of_row(starts: torch.Tensor, counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    slot = torch.full((num_rows,), -1)
    for number, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        slot[start : start + count] = number
    return slot


def expected(rows: torch.Tensor, weights: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """Products in float64, POISON in rows of no slot."""
    result = torch.full((len(rows), weights.shape[1]), POISON, dtype=torch.float64)
    for number, weight in enumerate(weights.double()):
        result[slot == number] = rows[slot == number].double() @ weight.T
    return result


def in_arena(values: torch.Tensor, gap: int = 48) -> torch.Tensor:
    """The same values, slots further apart than they are long."""
    num_slots = len(values)
    size = values[0].numel()
    arena = torch.zeros(num_slots, size + gap, dtype=values.dtype)
    arena[:, :size] = values.flatten(1)
    return arena[:, :size].view(values.shape)


def blown_up(scaled: Quantised, block: int) -> torch.Tensor:
    """Values in float64; a scale counts for 128 columns and ``block`` rows."""
    scales = scaled.scales.double().repeat_interleave(128, -1).repeat_interleave(block, -2)
    return scaled.values.double() * scales


@pytest.mark.parametrize(("tokens", "top_k", "room"), [(1, 1, 1), (50, 8, 3), (200, 6, 8)])
def test_kernel_chooses_replicas_as_torch_does(tokens: int, top_k: int, room: int) -> None:
    draw = torch.Generator().manual_seed(tokens)
    slots = torch.randperm(20 * room, generator=draw).view(20, room).to(torch.int32)
    cumulative = torch.randint(0, 65536, (20, room), generator=draw).sort(1).values.to(torch.int32)
    cumulative[:, -1] = 65536
    experts = torch.randint(-2, 20, (tokens, top_k), generator=draw)

    for seed in (0, -1, 2**40 + 3, -(2**63)):
        found, strays = torch.full_like(experts, 99), int32(0)
        choose_replicas(slots, cumulative, experts, torch.tensor([seed]), found, strays)
        assert torch.equal(found, choose_by_draw(slots, cumulative, experts, torch.tensor([seed])))
        assert int(strays) == 0


def test_ids_of_no_expert_are_dropped_and_counted() -> None:
    slots, cumulative = int32(7, 8, 9).view(3, 1), int32(65536, 65536, 65536).view(3, 1)
    experts = torch.tensor([[0, 3], [2, -1], [2**40, 1]])
    found, strays = torch.full_like(experts, 99), int32(10)

    choose_replicas(slots, cumulative, experts, torch.tensor([4]), found, strays)

    assert found.tolist() == [[7, -1], [9, -1], [-1, 8]]
    assert int(strays) == 12


@pytest.mark.parametrize("record_bytes", [4, 4096, 69_632])
def test_digests_are_those_of_the_host(record_bytes: int) -> None:
    draw = torch.Generator().manual_seed(1)
    arena = torch.randint(0, 256, (3, record_bytes + 64), dtype=torch.uint8, generator=draw)
    records, found = arena[:, :record_bytes], torch.full((3, 2), 5)

    digest_records(records, found)

    assert [tuple(row) for row in found.tolist()] == [digest(record) for record in records]


@LAYOUTS
@TILINGS
def test_every_slot_s_rows_meet_its_own_weights(layout: Layout, tiling: Tiling) -> None:
    starts, counts, num_rows = layout()
    rows, weights = random(num_rows, 128), in_arena(random(4, 192, 128, seed=1))
    slot = slot_of_row(starts, counts, num_rows)
    rows[slot < 0] = float("nan")  # a row of no slot must not touch another
    out = torch.full((num_rows, 192), POISON)

    grouped_gemm(rows, weights, starts, counts, out, tiling=tiling)

    torch.testing.assert_close(out.double(), expected(rows, weights, slot), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("layout", "scales"),
    [
        (grouped, "row by row"),
        (grouped, "column by column"),
        (padded, "row by row"),
        (padded, "slot by slot"),
    ],
)
def test_fp8_products_carry_the_scales_of_rows_and_blocks(layout: Layout, scales: str) -> None:
    starts, counts, num_rows = layout()
    row_scales = random(num_rows, 3, seed=2).abs()
    rows = Quantised(random(num_rows, 384).to(FP8), row_scales)
    weights = Quantised(
        in_arena(random(4, 256, 384, seed=1).to(FP8)), in_arena(random(4, 2, 3, seed=3))
    )
    if scales == "column by column":
        rows = rows._replace(scales=row_scales.T.contiguous().T)
    if scales == "slot by slot":  # DeepEP: [C, H / 128, M], seen as [C, M, H / 128]
        rows = rows._replace(scales=row_scales.view(4, 80, 3).transpose(1, 2).contiguous().mT)
    out = torch.full((num_rows, 256), POISON)

    grouped_gemm_fp8(rows, weights, starts, counts, out)

    plain = Quantised(rows.values, row_scales)
    slot = slot_of_row(starts, counts, num_rows)
    wanted = expected(blown_up(plain, 1), blown_up(weights, 128), slot)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-2)


def test_slots_without_any_row_write_nothing() -> None:
    out = torch.full((8, 64), POISON)

    grouped_gemm(random(8, 64), random(2, 64, 64), int32(0, 4), int32(0, 0), out)

    assert (out == POISON).all()


def close_to(found: Quantised, wanted: torch.Tensor) -> bool:
    """Whether values are within an e4m3 step, and scales the exact ones."""
    amax = wanted.abs().unflatten(1, (-1, 128)).amax(2).clamp(min=1e-4)
    torch.testing.assert_close(found.scales.double(), amax / 448, rtol=1e-5, atol=0)
    scales = found.scales.double().repeat_interleave(128, 1)
    step = wanted.abs() / 8 + scales / 128
    # Triton 3.6's interpreter loses the carry of a value that rounds up to a power of two.
    has_carry = (wanted / scales).frexp().mantissa.abs() > 0.96
    return bool((((blown_up(found, 1) - wanted).abs() <= step) | has_carry).all())


def empty_fp8(num_rows: int, columns: int) -> Quantised:
    values = torch.full((num_rows, columns), POISON).to(FP8)
    return Quantised(values, torch.full((columns // 128, num_rows), POISON).T)


def test_rows_are_scaled_by_their_largest_value_in_128_columns() -> None:
    rows = random(9, 384).to(BF16)
    rows[4] = 0
    rows[5, 130] = 3e4
    into = empty_fp8(9, 384)

    quantise_rows(rows, into)

    assert close_to(into, rows.double())


@LAYOUTS
def test_rows_of_no_slot_are_not_quantised(layout: Layout) -> None:
    starts, counts, num_rows = layout()
    used = slot_of_row(starts, counts, num_rows) >= 0
    rows, into = random(num_rows, 128).to(BF16), empty_fp8(num_rows, 128)

    quantise_rows(rows, into, starts=starts, counts=counts)

    assert close_to(Quantised(into.values[used], into.scales[used]), rows[used].double())
    assert (into.scales[~used] == POISON).all()
    assert (into.values[~used].float() == torch.tensor(POISON).to(FP8).float()).all()


@LAYOUTS
def test_gate_is_the_first_half(layout: Layout) -> None:
    starts, counts, num_rows = layout()
    used = slot_of_row(starts, counts, num_rows) >= 0
    gate_up = 3 * random(num_rows, 512)
    gate, up = gate_up.double().chunk(2, 1)
    wanted = torch.nn.functional.silu(gate) * up
    out, into = torch.full((num_rows, 256), POISON), empty_fp8(num_rows, 256)

    silu_times_up(gate_up, starts, counts, out)
    silu_times_up_fp8(gate_up, starts, counts, into)

    torch.testing.assert_close(out[used].double(), wanted[used], rtol=1e-5, atol=1e-6)
    assert (out[~used] == POISON).all()
    assert close_to(Quantised(into.values[used], into.scales[used]), wanted[used])
    assert (into.scales[~used] == POISON).all()


def test_results_are_weighed_and_summed_in_the_order_of_the_choices() -> None:
    num_rows, num_tokens, top_k, columns = 40, 17, 6, 3 * 256
    results, weights = random(num_rows, columns), random(num_tokens, top_k, seed=1)
    place = torch.full((num_tokens, top_k), -1)
    of_pairs = torch.randperm(num_tokens * top_k, generator=torch.Generator().manual_seed(2))
    place.view(-1)[of_pairs[:num_rows]] = torch.arange(num_rows)
    place[3] = -1  # a token without a row
    out = torch.full((num_tokens, columns), POISON)

    sum_rows(results, place, weights, out)

    rows = torch.where((place >= 0)[..., None], results[place.clamp(min=0)].double(), 0.0)
    wanted = (rows * weights[..., None]).sum(dim=1)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    assert not out[3].any()


def test_arguments_that_a_kernel_would_misread_are_rejected() -> None:
    starts = counts = int32(0, 0)
    rows, out = torch.zeros(4, 64), torch.zeros(4, 64)

    with pytest.raises(ValueError, match="found counts of 2 slots, expected 3"):
        grouped_gemm(rows, torch.zeros(3, 64, 64), starts, counts, out)
    with pytest.raises(ValueError, match="N and K that are multiples of 64"):
        grouped_gemm(rows, torch.zeros(2, 96, 64), starts, counts, out)
    with pytest.raises(ValueError, match=r"float32 \[4, 64\] and weights bfloat16"):
        grouped_gemm(rows, torch.zeros(2, 64, 64, dtype=BF16), starts, counts, out)
    with pytest.raises(ValueError, match="two contiguous int32 vectors"):
        grouped_gemm(rows, torch.zeros(2, 64, 64), starts.long(), counts, out)
    with pytest.raises(ValueError, match=r"found records uint8 .* expected uint8"):
        digest_records(torch.zeros(2, 8, dtype=torch.uint8)[:, ::2], torch.zeros(2, 2).long())
    with pytest.raises(ValueError, match=r"found seed int32 .* expected int64"):
        choose_replicas(
            int32(0).view(1, 1),
            int32(65536).view(1, 1),
            torch.zeros(1, 1).long(),
            counts,
            counts,
            int32(0),
        )
