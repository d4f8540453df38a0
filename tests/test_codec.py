"""Samples survive the way to bytes and back, and damaged bytes are refused in words."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eplb.errors import StoreError
from eplb.load import LoadSample
from telemetry.codec import SAMPLE_VERSION, sample_from_bytes, sample_to_bytes

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


def same(one: LoadSample, other: LoadSample) -> bool:
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


@settings(deadline=None)
@given(samples())
def test_a_sample_comes_back_as_it_was(sample: LoadSample) -> None:
    assert same(sample_from_bytes(sample_to_bytes(sample)), sample)


@pytest.mark.parametrize("most", [0, 255, 256, 65_535, 65_536, 2**31, 2**32, 2**63 - 1])
def test_counts_at_the_edge_of_a_narrower_type_are_exact(most: int) -> None:
    sample = make_sample(tokens=[[most, 0], [1, 0]])

    assert sample_from_bytes(sample_to_bytes(sample)).tokens[0, 0] == most


def test_a_sample_of_58_layers_and_9_slots_takes_less_than_3_kb() -> None:
    rng = np.random.default_rng(1)
    held = np.stack([rng.permutation(256)[:9] for _ in range(58)])
    sample = make_sample(slot_to_expert=held, tokens=rng.integers(0, 2**31, (58, 9)))

    assert len(sample_to_bytes(sample)) < 3_000


@settings(deadline=None)
@given(samples(), st.data())
def test_a_flipped_bit_anywhere_is_noticed(sample: LoadSample, data: st.DataObject) -> None:
    record = bytearray(sample_to_bytes(sample))
    bit = data.draw(st.integers(0, len(record) * 8 - 1))
    record[bit // 8] ^= 1 << bit % 8

    with pytest.raises(StoreError, match="a sample record"):
        sample_from_bytes(bytes(record))


@settings(deadline=None)
@given(st.data())
def test_a_cut_record_is_noticed(data: st.DataObject) -> None:
    record = sample_to_bytes(make_sample())

    with pytest.raises(StoreError, match="a sample record"):
        sample_from_bytes(record[: data.draw(st.integers(0, len(record) - 1))])


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(record: bytes) -> None:
    with pytest.raises(StoreError, match="a sample record"):
        sample_from_bytes(record)


def test_a_record_of_another_version_is_refused() -> None:
    record = bytearray(sample_to_bytes(make_sample()))
    record[4] = SAMPLE_VERSION + 1

    with pytest.raises(StoreError, match="has version 2, expected 1"):
        sample_from_bytes(bytes(record))
