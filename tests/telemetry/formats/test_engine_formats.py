"""Each format is read from a literal of its description, and refused where it lies."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from eplb.core.load import LoadSample
from eplb.core.model import ModelShape, numbers_in
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError, EplbError, HistoryError, PlacementError, StoreError
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from telemetry import RunInfo, open_store
from telemetry.formats.checks import TargetDeployment, findings
from telemetry.formats.engines.vllm import StepSums
from telemetry.formats.table import (
    WriteOptions,
    read,
    read_load,
    read_placement,
    write_placement,
)
from telemetry.formats.types import (
    LoadFile,
    PlacementFile,
    ReadOptions,
    as_layers,
    rows_as_hidden,
    rows_in_order,
)
from telemetry.state.redis_address import SCHEMES
from tests.support.engines.ascend_check import has_no_move_within_a_device
from tests.support.formats.seeds import (
    MAP,
    PHYSICAL,
    RAW,
    STEPS,
    VLLM_MAPPING,
    VLLM_META,
    VLLM_STATS,
    npz,
    per_pass,
    per_token,
    seeds,
    torch_file,
    write_seed,
)

NONE = ReadOptions()
LOGICAL = [[5, 1, 0, 2], [4, 3, 1, 0]]  # of PHYSICAL under MAP, by hand


def one_file(folder: Path, name: str, data: bytes | str) -> str:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


@pytest.mark.parametrize("seed", list(seeds()))
def test_format_is_told_by_its_name_and_contents(tmp_path: Path, seed: str) -> None:
    files, options = seeds()[seed]
    place = write_seed(tmp_path, files)

    told, named = read(place, options), read(place, options, seed.partition("/")[0])

    assert type(told) is type(named)
    if isinstance(told, LoadFile) and isinstance(named, LoadFile):
        assert np.array_equal(told.history.tokens, named.history.tokens)


# -- SGLang


def test_sglang_stat_dump_is_steps_by_hidden_layers_without_those_not_filled(
    tmp_path: Path,
) -> None:
    dense = np.zeros((2, 3, 4), dtype=np.int32)
    steps = np.concatenate([np.concatenate([dense, STEPS], axis=1), np.zeros((6, 5, 4), np.int32)])
    place = one_file(tmp_path, "d.pt", torch_file({"rank": 0, "logical_count": steps}))

    found = read_load(place, NONE)

    assert found.history.tokens.tolist() == STEPS.tolist()
    assert (found.layers.ids, found.layers.axis, found.layers.num_hidden) == ((3, 4), "model", 5)
    for told in ("layers 0-2 ", "circular", "6 of 8 steps"):
        assert any(told in note for note in found.notes)


def test_sglang_stat_dump_of_torch_itself_is_read_alike(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    counts = torch.tensor(STEPS)
    dump = {"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": 0.5}
    torch.save(dump, tmp_path / "d.pt")
    torch.save(
        {"logical_count": counts.transpose(0, 1).contiguous().transpose(0, 1)}, tmp_path / "s.pt"
    )

    for name in ("d.pt", "s.pt"):
        assert read_load(str(tmp_path / name), NONE).history.tokens.tolist() == STEPS.tolist()


def test_sglang_dump_by_pass_is_the_sum_of_ranks_by_the_map(tmp_path: Path) -> None:
    alone = read_load(one_file(tmp_path, "one.pt", torch_file(per_pass(0))), NONE)
    (folder := tmp_path / "all").mkdir()
    for rank in (0, 1):
        name = f"expert_distribution_recorder_1.5_{rank}.pt"
        (folder / name).write_bytes(torch_file(per_pass(rank)))
    both = read_load(str(folder), NONE)

    assert alone.history.tokens.tolist() == [LOGICAL] * 2
    assert both.history.tokens.tolist() == (2 * np.array([LOGICAL] * 2)).tolist()
    assert int(both.history.tokens.sum()) == 4 * PHYSICAL.sum()
    assert (both.num_ranks, both.history.first_step.tolist()) == (2, [7, 8])
    assert both.current is not None
    assert both.current.placement.slot_to_expert.tolist() == MAP.tolist()
    assert any("of one rank alone" in note for note in alone.notes)


def test_sglang_passes_that_not_all_ranks_have_are_counted_and_not_used(tmp_path: Path) -> None:
    for rank in (0, 1):
        part = per_pass(rank)
        part["records"] = part["records"][: 2 - rank]
        name = f"expert_distribution_recorder_1.5_{rank}.pt"
        (tmp_path / name).write_bytes(torch_file(part))

    found = read_load(str(tmp_path), NONE)

    assert found.history.tokens.tolist() == [(2 * np.array(LOGICAL)).tolist()]
    assert found.history.first_step.tolist() == [7]
    assert "1 of 2 passes are not in all 2 files: not used" in found.notes
    with pytest.raises(HistoryError, match="1 of 2 passes"):
        read_load(str(tmp_path), ReadOptions(strict=True))


def test_sglang_dump_by_token_counts_slots_without_padding(tmp_path: Path) -> None:
    found = read_load(one_file(tmp_path, "d.pt", torch_file(per_token())), NONE)

    # Layer 0: two tokens to slots 0 and 4, both expert 0; layer 1: to 5 (expert 3), 1 (expert 2).
    assert found.history.tokens[0].tolist() == [[4, 0, 0, 0], [0, 0, 2, 2]]


def test_sglang_location_is_written_with_its_one_key(tmp_path: Path) -> None:
    file = PlacementFile(Placement(MAP.astype(np.int32), 4), as_layers([1, 2]))
    notes = write_placement(file, "sglang", tmp_path / "o.json", WriteOptions(3, 4))
    written = json.loads((tmp_path / "o.json").read_text())

    in_order = [0, 1, 2, 3, 0, 1]
    assert written == {"physical_to_logical_map": [in_order, *MAP.tolist(), in_order]}
    assert "2 rows of dense layers hold experts in order" in notes


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (b"\x80\x02cos\nsystem\n(X\x04\0\0\0truetR.", r"os\.system"),
        (b"\x80\x02cbuiltins\neval\n.", r"builtins\.eval"),
        (b"\x80\x02]r\xff\xff\xff\xff.", "logical_count"),
        (b"\x80\x04\x95\0\0\0\0\0\0\0\0.", "not of protocol 2"),
        (b"\x80\x02(X\xff\xff\xff\xff", "4294967295 bytes"),
        (b"\x80\x02}(X\x01\0\0\0aub.", "keys"),
        (b"\x80\x02h\x05.", "memo 5"),
        (b"\x80\x02X\x01\0\0\0aQ.", "persistent id"),
        (b"(dp0\n.", "instruction b'd'"),
    ],
)
def test_pickle_program_that_is_not_of_tensors_is_refused(
    tmp_path: Path, program: bytes, why: str
) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x/data.pkl", program)

    with pytest.raises(HistoryError, match=why):
        read_load(one_file(tmp_path, "d.pt", buffer.getvalue()), NONE)


def test_tensor_past_its_storage_is_refused(tmp_path: Path) -> None:
    whole = torch_file({"rank": 0, "logical_count": STEPS})
    shape = b"J\x02\0\0\0J\x02\0\0\0J\x04\0\0\0"
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as read_from, zipfile.ZipFile(buffer, "w") as to:
        for name in read_from.namelist():
            to.writestr(name, read_from.read(name).replace(shape, shape[:10] + b"J\xff\xff\0\0"))

    with pytest.raises(HistoryError, match="storage of 16"):
        read_load(one_file(tmp_path, "d.pt", buffer.getvalue()), NONE)


# -- vLLM


def test_vllm_lines_are_folded_by_the_map_of_each_line(tmp_path: Path) -> None:
    later = VLLM_STATS | {"step": 9, "p2l_map": [[1, 0, 3, 2], [0, 1, 2, 3]]}
    marker = {"record_type": "bench_run_start"}
    text = "".join(json.dumps(one) + "\n" for one in (VLLM_META, marker, VLLM_STATS, later))
    found = read_load(one_file(tmp_path, "d.jsonl", text), NONE)

    assert found.history.tokens.tolist() == [
        [[10, 1, 5, 2], [2, 8, 5, 3]],
        [[1, 10, 2, 5], [2, 8, 5, 3]],
    ]
    assert (found.layers.axis, found.num_ranks, found.num_nodes) == ("ordinal", 2, 1)
    assert found.history.last_step.tolist() == [7, 9]
    assert found.current is not None
    assert found.current.placement.slot_to_expert[0].tolist() == [1, 0, 3, 2]


def test_vllm_lines_of_a_second_model_are_refused(tmp_path: Path) -> None:
    lines = VLLM_META, VLLM_STATS, VLLM_META | {"model": "other"}, VLLM_STATS | {"step": 9}
    text = "".join(json.dumps(one) + "\n" for one in lines)

    with pytest.raises(HistoryError, match="line 3 is of model other, expected m as lines before"):
        read_load(one_file(tmp_path, "d.jsonl", text), NONE)


def test_vllm_tokens_in_an_empty_slot_are_refused(tmp_path: Path) -> None:
    wrong = VLLM_STATS | {"p2l_map": [[0, 1, 2, -1], [0, 1, 2, 3]]}

    with pytest.raises(HistoryError, match="slot without an expert"):
        read_load(one_file(tmp_path, "d.jsonl", json.dumps(wrong)), NONE)


# -- TensorRT-LLM


def test_trtllm_statistics_are_summed_over_ranks_by_real_layers(tmp_path: Path) -> None:
    files, _ = seeds()["trtllm-statistics"]
    (tmp_path / "rank0_raw.safetensors").write_bytes(b"not counts")
    found = read_load(write_seed(tmp_path, files), NONE)

    assert (found.layers.ids, found.layers.axis, found.num_ranks) == ((3, 4), "model", 2)
    assert found.history.first_step.tolist() == [100, 101]
    assert found.history.tokens[0, 0].tolist() == [8, 4, 0, 2, 6, 4, 4, 4]


def test_trtllm_statistics_with_a_gap_are_refused(tmp_path: Path) -> None:
    counts = {f"{step}_3": np.arange(8) for step in (100, 102)}
    files = {"meta_info.json": b'{"num_experts": 8}', "rank0.safetensors": save(counts)}

    with pytest.raises(HistoryError, match=r"2 iterations in 100\.\.102"):
        read_load(write_seed(tmp_path, files), NONE)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"a: &x [1]\nb: *x\n", "an alias in YAML"),
        (b"num_slots: 2\nep_size: 3\n", "ep_size"),
        (b"num_slots: !!python/object/apply:os.system [x]\n", "num_slots is a list"),
        (b"num_slots: 2\nnum_slots: 2\n", "twice"),
        (b"[" * 100, "levels of YAML"),
        (b"a: [", "no YAML"),
    ],
)
def test_yaml_that_is_not_plain_is_refused(tmp_path: Path, text: bytes, why: str) -> None:
    with pytest.raises(HistoryError, match=why):
        read_placement(one_file(tmp_path, "c.yaml", text), NONE)


# -- vllm-ascend


def test_ascend_map_keeps_slots_and_replaces_second_replicas(tmp_path: Path) -> None:
    base = PlacementFile(Placement(np.array([[0, 1, 2, 3, 0, 1]]), 4), rows_in_order(1), 2)
    target = PlacementFile(Placement(np.array([[2, 0, 2, 1, 3, 0]]), 4), rows_in_order(1), 2)
    notes = write_placement(target, "ascend", tmp_path / "m.json", WriteOptions(2, None, base))
    written = read_placement(str(tmp_path / "m.json"), NONE)

    # The second expert 2 of device 0 becomes one that the device lacks; 0 and 2 stay in place.
    assert written.placement.slot_to_expert.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert any("second replicas on one rank are replaced" in note for note in notes)
    assert any("reordered" in note for note in notes)
    assert has_no_move_within_a_device(base, written)


# -- routing, tables and our own


def test_raw_routing_of_sglang_drops_dense_layers_and_asks_for_its_shape(tmp_path: Path) -> None:
    ids = np.array([[[0, 0], [1, 2]], [[0, 0], [0, 2]]], dtype="<i4")  # [tokens, layers, top-k]
    found = read_load(one_file(tmp_path, "r.bin", ids.tobytes()), RAW)

    assert found.history.tokens.tolist() == [[[0, 1, 1]], [[1, 0, 1]]]
    assert found.layers.ids == (1,)
    with pytest.raises(ConfigError, match="--num-layers and --top-k"):
        read_load(one_file(tmp_path, "r.bin", bytes(32)), NONE)


def test_ultra_ep_skips_micro_batches_that_lack_a_layer(tmp_path: Path) -> None:
    chunk = npz(
        layers=np.array([3, 4, 3], dtype=np.int32),
        microbatches=np.array([0, 0, 1]),
        pre_logical_loads=np.array([[1, 2], [3, 4], [5, 6]], dtype=np.int32),
    )
    manifest = b'{"schema": "ultra_ep_trace_v1", "chunks": 1}'
    found = read_load(write_seed(tmp_path, {"t.manifest.json": manifest, "c.npz": chunk}), NONE)

    assert found.history.tokens.tolist() == [[[1, 2], [3, 4]]]
    assert found.layers.ids == (3, 4)
    assert "1 of 2 micro-batches lack layers: not used" in found.notes


def test_csv_with_a_layer_column_has_its_numbers(tmp_path: Path) -> None:
    named = read_load(one_file(tmp_path, "a.csv", "layer,0,1\n3,5,1\n7,0,2\n"), NONE)
    plain = read_load(one_file(tmp_path, "b.csv", "5,1\n0,2\n"), NONE)

    assert named.history.tokens.tolist() == plain.history.tokens.tolist() == [[[5, 1], [0, 2]]]
    assert (named.layers.ids, plain.layers.axis) == ((3, 7), "ordinal")


def test_store_gives_its_windows_and_the_placement_that_serves(tmp_path: Path) -> None:
    topology = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
    model = ModelShape((3,), 4, 2, 8, 8)
    url = str(tmp_path / "store.sqlite")
    store = open_store(url, "demo")
    store.begin_run(RunInfo("r", 0.0, model_to_dict(model), topology_to_dict(topology), 1))
    held = np.array([[0, 1, 2, 3]])
    store.commit(Placement(held, 4, 1), expected=None, reason="first")
    for rank in (0, 1):
        slots = held[:, 2 * rank : 2 * rank + 2]
        tokens = np.array([[1 + rank, 2]])
        store.append([LoadSample("demo", "r", rank, 0, 0.0, 0, 0, "decode", 1, slots, tokens)])
    store.close()

    found = read_load(url, NONE)

    assert found.history.tokens.tolist() == [[[1, 2, 2, 2]]]
    assert found.layers.ids == (3,)
    assert found.current is not None
    assert found.current.placement.slot_to_expert.tolist() == held.tolist()
    with pytest.raises(StoreError, match="has no run"):
        read_load(url, ReadOptions(deployment="other"))


def test_changed_own_placement_is_refused(tmp_path: Path) -> None:
    files, _ = seeds()["eplb"]
    changed = files[".json"].replace(b"[0, 1, 2, 3, 0, 1]", b"[0, 1, 2, 3, 0, 2]")

    with pytest.raises(PlacementError, match="sha256"):
        read_placement(one_file(tmp_path, "p.json", changed), NONE)


# -- layers and windows


def test_layer_numbers_are_asked_for_where_a_format_needs_them(tmp_path: Path) -> None:
    vllm = read_placement(one_file(tmp_path, "m.json", json.dumps(VLLM_MAPPING)), NONE)
    told = read_placement(str(tmp_path / "m.json"), ReadOptions(first_moe_layer=3))

    with pytest.raises(ConfigError, match="--layer-ids, --first-moe-layer or --model"):
        write_placement(vllm, "trtllm", tmp_path / "o.yaml", WriteOptions(2))
    write_placement(told, "trtllm", tmp_path / "o.yaml", WriteOptions(2))
    assert read_placement(str(tmp_path / "o.yaml"), NONE).layers.ids == (3, 4)


def test_rows_that_may_be_dense_are_not_written_as_moe_layers(tmp_path: Path) -> None:
    file = PlacementFile(Placement(MAP.astype(np.int32), 4), rows_as_hidden(2))

    for target in ("vllm", "ascend"):
        with pytest.raises(ConfigError, match="dense layer"):
            write_placement(file, target, tmp_path / "o.json", WriteOptions(3))
    assert [one.code for one in findings(file, "vllm", TargetDeployment(3)) if one.is_error] == [
        "dense-rows"
    ]


def test_layer_ids_are_numbers_and_ranges() -> None:
    assert numbers_in("3-5", "--layer-ids") == (3, 4, 5)
    assert numbers_in("0, 2-3", "--layer-ids") == (0, 2, 3)
    for wrong in ("3-", "5-3", "x", "3,3", "4,2", "", "-1", "0-99999"):
        with pytest.raises(ConfigError, match=r"--layer-ids: found .*, expected"):
            numbers_in(wrong, "--layer-ids")


def test_steps_are_summed_into_a_bounded_number_of_windows() -> None:
    for most in (1, 2, 3, 8):
        sums = StepSums(most)
        for step in range(37):
            sums.add(step, np.array([[step]]))
        found = sums.history()

        assert found.num_windows <= most
        assert int(found.tokens.sum()) == sum(range(37))
        for tokens, first, last in zip(
            found.tokens, found.first_step, found.last_step, strict=True
        ):
            assert int(tokens[0, 0]) == sum(range(first, last + 1))


def test_empty_slots_are_filled_and_reported(tmp_path: Path) -> None:
    file = PlacementFile(Placement(np.array([[0, 1, -1, 2, 3, -1]]), 4), as_layers([0]), 2)
    notes = write_placement(file, "trtllm", tmp_path / "o.yaml", WriteOptions())

    assert read_placement(str(tmp_path / "o.yaml"), NONE).placement.slot_to_expert.tolist() == [
        [0, 1, 2, 2, 3, 0]
    ]
    assert any(note.startswith("2 empty slots are filled") for note in notes)


@pytest.mark.parametrize(
    ("target", "deployment", "code"),
    [
        ("sglang", TargetDeployment(num_redundant=3), "redundancy"),
        ("sglang", TargetDeployment(num_ranks=4), "divides"),
        ("ascend", TargetDeployment(num_ranks=1), "duplicate"),
        ("trtllm", TargetDeployment(), "layers"),
    ],
)
def test_validation_finds_what_the_engine_would_refuse(
    target: str, deployment: TargetDeployment, code: str
) -> None:
    file = PlacementFile(Placement(np.array([[0, 1, 2, 3, 0, 1]]), 4), rows_in_order(1))

    found = findings(file, target, deployment)  # type: ignore[arg-type]

    assert code in [one.code for one in found if one.is_error]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_url_of_each_redis_scheme_is_read_as_a_store(scheme: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{scheme}://")):  # it names no server
        read(f"{scheme}://", NONE)


def test_unknown_file_is_refused_with_the_known_formats(tmp_path: Path) -> None:
    for name, data in (("x.dat", b"x"), ("x.json", b"{}"), ("x.json", b"7")):
        with pytest.raises(EplbError):
            read(one_file(tmp_path, name, data), NONE)
    with pytest.raises(HistoryError, match="does not exist"):
        read(str(tmp_path / "none.pt"), NONE)
