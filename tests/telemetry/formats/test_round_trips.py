"""What is written is read back identical, for every placement format."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb.core.load import LoadHistory
from eplb.core.placement import Placement
from telemetry.formats.table import (
    PLACEMENT_WRITERS,
    WriteOptions,
    read_load,
    read_placement,
    write_load,
    write_placement,
)
from telemetry.formats.types import LoadFile, PlacementFile, ReadOptions, as_layers, rows_in_order
from tests.support.formats.fuzz import fuzz
from tests.support.formats.seeds import seeds


@st.composite
def placement_files(draw: st.DrawFn, *, has_empty: bool = False) -> PlacementFile:
    """A complete placement without duplicates on a rank: what every format expresses."""
    num_ranks = draw(st.integers(1, 4))
    each = draw(st.integers(1, 4))
    num_experts = draw(st.integers(each, num_ranks * each))
    seed = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=3)))
    rows = []
    for _ in ids:
        # Consecutive experts modulo E: at most E slots on a rank, so none stands there twice.
        row = np.arange(num_ranks * each) % num_experts
        rows.append(seed.permutation(num_experts)[row])
    held = np.array(rows, dtype=np.int32)
    placement = Placement(held, num_experts)
    if has_empty:
        spare = np.full((len(ids), num_ranks), -1, dtype=np.int32)
        wide = np.concatenate([held, spare], axis=1)
        count = Placement(wide, num_experts)
        share = count.slot_share.copy()
        placement = Placement(wide, num_experts, draw(st.integers(0, 2**40)), share)
    return PlacementFile(placement, as_layers(ids), num_ranks, "m", provenance={"source": "x"})


@pytest.mark.parametrize("target", sorted(PLACEMENT_WRITERS))
@settings(max_examples=15, deadline=None, derandomize=True)
@given(file=placement_files())
def test_placement_is_read_back_identical(target: str, file: PlacementFile) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("p.yaml" if target == "trtllm" else "p.json")
        write_placement(file, target, path, WriteOptions(file.num_ranks, 10))
        options = ReadOptions(layer_ids=file.layers.ids, num_experts=file.placement.num_experts)
        found = read_placement(str(path), options)
        again = path.with_name(f"again{path.suffix}")
        write_placement(found, target, again, WriteOptions(file.num_ranks, 10))

        assert np.array_equal(found.placement.slot_to_expert, file.placement.slot_to_expert)
        assert found.layers.ids == file.layers.ids
        assert again.read_bytes() == path.read_bytes() or target == "eplb"


@settings(max_examples=15, deadline=None, derandomize=True)
@given(file=placement_files(has_empty=True))
def test_own_placement_keeps_empty_slots_shares_and_provenance(file: PlacementFile) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.json"
        write_placement(file, "eplb", path, WriteOptions())
        found = read_placement(str(path), ReadOptions())

    assert found.placement.hash == file.placement.hash
    assert found.placement.generation == file.placement.generation
    kept = ("layers", "num_ranks", "model", "provenance")
    assert [getattr(found, name) for name in kept] == [getattr(file, name) for name in kept]


def test_shares_of_replicas_that_a_format_lacks_are_reported_as_lost(tmp_path: Path) -> None:
    share = np.array([[0.75, 1.0, 0.25, 1.0]])
    file = PlacementFile(Placement(np.array([[0, 1, 0, 2]]), 3, 1, share), rows_in_order(1), 2)

    assert write_placement(file, "eplb", tmp_path / "p.json", WriteOptions()) == ()
    lost = write_placement(file, "vllm", tmp_path / "v.json", WriteOptions())
    assert any("shares of replicas" in note for note in lost)


@pytest.mark.parametrize("target", ["counts", "eplb-trace", "vllm-load"])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), shape=st.tuples(*[st.integers(1, 5)] * 3))
def test_load_is_read_back_identical(target: str, seed: int, shape: tuple[int, int, int]) -> None:
    tokens = np.random.default_rng(seed).integers(0, 2**40, shape)
    file = LoadFile(LoadHistory(tokens), rows_in_order(shape[1]))
    with tempfile.TemporaryDirectory() as folder:
        name = {"counts": "c.json", "eplb-trace": "t", "vllm-load": "l.jsonl"}[target]
        write_load(file, target, Path(folder) / name, WriteOptions())
        found = read_load(str(Path(folder) / name), ReadOptions())

    assert np.array_equal(found.history.tokens, tokens)
    assert found.layers == file.layers


@pytest.mark.slow
@pytest.mark.parametrize("reader", list(seeds()))
def test_mutated_files_are_read_or_refused_in_a_sentence(reader: str) -> None:
    found = fuzz(reader, inputs=1000, seed=7)

    assert found.wrong == []
    assert found.read + found.refused == 1000
    assert found.grown_mb < 64


@pytest.mark.system
def test_mutated_torch_files_are_read_or_refused_in_a_sentence() -> None:
    found = fuzz("sglang-dump", inputs=60, seed=7)

    assert found.wrong == []
    assert found.read + found.refused == 60
