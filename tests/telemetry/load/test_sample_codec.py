"""Samples survive the way to bytes and back, and damaged bytes are refused in words."""

import itertools
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb.core.load import LoadSample
from eplb.errors import StoreError
from telemetry.load import sample_codec as packing
from telemetry.load.rollup import Rollup, rollup_from_bytes, rollup_to_bytes
from telemetry.load.sample_codec import sample_from_bytes, sample_to_bytes

INT64 = st.integers(-(2**63), 2**63 - 1)
SHAPES = hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=4)


def make_sample(**changes: Any) -> LoadSample:
    fields: dict[str, Any] = {
        "deployment": "demo",
        "run": "run-1",
        "rank": 3,
        "sequence": 7,
        "time": 1_700_000_000.25,
        "first_step": 100,
        "last_step": 199,
        "phase": "decode",
        "generation": 2,
        "slot_to_expert": [[0, 1], [2, -1]],
        "tokens": [[10, 20], [30, 0]],
    }
    return LoadSample(**(fields | changes))


def same(one: object, other: object) -> bool:
    mine, theirs = vars(one), vars(other)
    return all(np.array_equal(mine[name], theirs[name]) for name in mine)


@st.composite
def samples(draw: st.DrawFn) -> LoadSample:
    shape = draw(SHAPES)
    first_step = draw(st.integers(0, 2**62))
    return make_sample(
        deployment=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=9)),
        run=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=9)),
        rank=draw(INT64),
        sequence=draw(INT64),
        time=draw(st.floats(allow_nan=False)),
        first_step=first_step,
        last_step=first_step + draw(st.integers(0, 2**40)),
        phase=draw(st.sampled_from(["prefill", "decode", "mixed"])),
        generation=draw(INT64),
        slot_to_expert=draw(hnp.arrays(np.int32, shape)),
        tokens=draw(hnp.arrays(np.int64, shape, elements=st.integers(0, 2**63 - 1))),
    )


@settings(deadline=None, max_examples=20)
@given(sample=samples())
def test_sample_round_trips(sample: LoadSample) -> None:
    assert same(sample_from_bytes(sample_to_bytes(sample)), sample)


@pytest.mark.parametrize("most", [0, 255, 256, 65_535, 65_536, 2**31, 2**32, 2**63 - 1])
def test_counts_at_the_edge_of_a_narrower_type_are_exact(most: int) -> None:
    sample = make_sample(tokens=[[most, 0], [1, 0]])

    assert sample_from_bytes(sample_to_bytes(sample)).tokens[0, 0] == most


def make_large_sample(mean_tokens: float, rng: np.random.Generator) -> LoadSample:
    """58 layers x 9 slots of 256 experts, some much hotter than others."""
    held = np.stack([rng.permutation(256)[:9] for _ in range(58)])
    heat = rng.gamma(1.5, 1 / 1.5, size=held.shape)
    return make_sample(slot_to_expert=held, tokens=rng.poisson(mean_tokens * heat))


def test_sample_of_58_layers_and_9_slots_takes_1_to_3_kb(rng: np.random.Generator) -> None:
    for mean_tokens in (20, 4_000, 1_000_000):
        record = sample_to_bytes(make_large_sample(mean_tokens, rng))
        assert 1_000 < len(record) < 2_500


def test_codec_detects_any_changed_byte_and_any_truncation() -> None:
    record = sample_to_bytes(make_sample())

    for place, change in itertools.product(range(len(record)), (1, 2, 4, 8, 16, 32, 64, 128, 255)):
        damaged = bytearray(record)
        damaged[place] ^= change
        with pytest.raises(StoreError, match="sample record"):
            sample_from_bytes(bytes(damaged))
    for kept in range(len(record)):
        with pytest.raises(StoreError, match="sample record"):
            sample_from_bytes(record[:kept])


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(record: bytes) -> None:
    with pytest.raises(StoreError, match="sample record"):
        sample_from_bytes(record)


# -- records that are sealed as they are, and yet are no samples


def sealed(*, layers: int = 2, slots: int = 2, arrays: bytes, phase: int = 1) -> bytes:
    header = struct.pack("<BBB4I5qd", 0, 0, phase, 1, 1, layers, slots, 3, 7, 0, 9, 2, 1.5)
    return packing.seal(b"EPLS", 2, header + b"dr" + arrays)


def test_sealed_record_is_read() -> None:
    sample = sample_from_bytes(sealed(arrays=packing.compress(bytes(range(8)))))

    assert sample.slot_to_expert.tolist() == [[0, 1], [2, 3]]
    assert sample.tokens.tolist() == [[4, 5], [6, 7]]


BOMB = packing.compress(bytes(50_000_000))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arrays": BOMB}, "50000000 bytes, expected 8"),
        ({"arrays": packing.compress(b"")}, "0 bytes, expected 8"),
        ({"arrays": BOMB, "layers": 2**32 - 1, "slots": 2**32 - 1}, "67108864"),
        ({"arrays": BOMB, "layers": 2**14, "slots": 2**13}, "67108864"),
        ({"arrays": b"no frame"}, "cannot be unpacked"),
        ({"arrays": packing.compress(bytes(8))[:-1]}, "cannot be unpacked"),
        ({"arrays": packing.compress(bytes(8)) * 2}, "cannot be unpacked"),
        ({"arrays": packing.compress(bytes(8)), "phase": 9}, "version 2"),
    ],
)
def test_sealed_record_that_holds_no_sample_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    record = sealed(**fields)

    tracemalloc.start()
    try:
        with pytest.raises(StoreError, match=message):
            sample_from_bytes(record)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most_bytes < 1_000_000


# -- roll-ups


def make_rollup(**changes: Any) -> Rollup:
    fields: dict[str, Any] = {
        "run": "run-1",
        "phase": "mixed",
        "seconds": 60,
        "start": 120.0,
        "first_step": 5,
        "last_step": 2**40,
        "num_samples": 12,
        "generations": frozenset({1, 7}),
        "ranks": frozenset({0, 2}),
        "tokens": [[1, 2, 2**62]],
        "received": [[0, 70_000]],
    }
    return Rollup(**(fields | changes))


def test_roll_up_is_read_back_and_any_damage_detected() -> None:
    rollup = make_rollup()
    record = rollup_to_bytes(rollup)

    assert same(rollup_from_bytes(record), rollup)
    for place in range(len(record)):
        damaged = bytearray(record)
        damaged[place] ^= 1
        for wrong in (bytes(damaged), record[:place]):
            with pytest.raises(StoreError, match="roll-up record"):
                rollup_from_bytes(wrong)


@pytest.mark.parametrize("text", [b"{}", b"[]", b"nonsense", b'{"arrays": [[99, [1, 1]]]}'])
def test_sealed_record_that_holds_no_roll_up_is_refused(text: bytes) -> None:
    lengths = struct.pack("<II", len(text), len(text))
    record = packing.seal(b"EPLR", 1, lengths + packing.compress(text))

    with pytest.raises(StoreError, match="roll-up record"):
        rollup_from_bytes(record)
