"""What a file is taken for, what contradicts a statement, and which layers its rows are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save

from eplb import plan
from eplb.core.load import LoadHistory
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError, EplbError, HistoryError, PlacementError
from telemetry.formats.checks import TargetDeployment, findings
from telemetry.formats.table import (
    WriteOptions,
    read,
    read_load,
    read_placement,
    write_load,
    write_placement,
)
from telemetry.formats.types import LoadFile, PlacementFile, ReadOptions, as_layers, rows_in_order
from tests.support.formats.seeds import (
    ASCEND_JSON,
    PHYSICAL,
    npy,
    npz,
    per_pass,
    seeds,
    torch_file,
    write_seed,
)

NONE = ReadOptions()
EXPERTS = 16
IDS = np.random.default_rng(0).random((960, 3, EXPERTS)).argsort(axis=2)[:, :, :2]
# Of layer l and expert e, by the definition of a count; 24 windows of 40 tokens.
COUNTED = [
    [[int((part[:, layer] == e).sum()) for e in range(EXPERTS)] for layer in range(3)]
    for part in IDS.reshape(24, 40, 3, 2)
]
TOKENS = np.array([[50, 10, 20, 20], [30, 30, 10, 30]])  # of layers 3 and 4


def place(folder: Path, name: str, data: bytes | str) -> str:
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return str(folder / name)


# -- routing ids and counts


@pytest.mark.parametrize("dtype", ["u1", "u2", "i2", ">i2", "i4", "i8", ">i8", "u8"])
def test_routing_ids_of_each_integer_type_are_counted_alike(tmp_path: Path, dtype: str) -> None:
    path = place(tmp_path, "r.npy", npy(IDS.astype(dtype)))
    found = read_load(path, ReadOptions(num_experts=EXPERTS))

    assert found.history.tokens.tolist() == COUNTED
    assert found.notes[0] == "taken as routing ids of 16 experts, top-2, format vllm-routing, vLLM"
    if np.dtype(dtype).itemsize <= 2:  # the types that vLLM returns
        assert read_load(path, NONE).history.tokens.tolist() == COUNTED
    else:
        with pytest.raises(ConfigError, match="--experts with the model's number, --format"):
            read_load(path, NONE)
        assert read_load(path, NONE, "vllm-routing").history.tokens.tolist() == COUNTED


def test_routing_ids_in_a_torch_file_are_told_as_those_of_numpy(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for dtype in ("uint8", "uint16", "int16"):
        torch.save(torch.tensor(IDS).to(getattr(torch, dtype)), tmp_path / "r.pt")

        assert read_load(str(tmp_path / "r.pt"), NONE).history.tokens.tolist() == COUNTED


@pytest.mark.parametrize("dtype", ["u2", "i4", "i8", "f4", "f8"])
def test_counts_whose_layers_have_equal_totals_are_counts(tmp_path: Path, dtype: str) -> None:
    counts = np.array([TOKENS, TOKENS[::-1], TOKENS + np.array([3, 1, 2, 0])])
    found = read_load(place(tmp_path, "c.npy", npy(counts.astype(dtype))), NONE)

    assert found.history.tokens.tolist() == counts.tolist()
    assert found.notes[0] == "taken as load of 4 experts, format npy"


def test_small_integers_that_name_an_expert_twice_need_a_format(tmp_path: Path) -> None:
    path = place(tmp_path, "c.npy", npy(np.array([[[5, 5, 1], [2, 3, 1]]] * 2, dtype=np.uint8)))

    with pytest.raises(ConfigError, match="names an expert twice: expected --format npy"):
        read_load(path, NONE)
    assert read_load(path, NONE, "npy").history.num_experts == 3
    with pytest.raises(HistoryError, match=r"token 0, row 0 names experts \[5, 5, 1\]"):
        read_load(path, NONE, "vllm-routing")


def test_routing_ids_saved_as_floats_are_told_as_integers_are(tmp_path: Path) -> None:
    for dtype in ("f4", "f8"):
        path = place(tmp_path, "r.npy", npy(IDS.astype(dtype)))

        with pytest.raises(ConfigError, match="--experts with the model's number, --format"):
            read_load(path, NONE)
        for options, name in ((ReadOptions(num_experts=EXPERTS), None), (NONE, "vllm-routing")):
            assert read_load(path, options, name).history.tokens.tolist() == COUNTED


def test_probabilities_of_tokens_are_no_load_unless_npy_is_named(tmp_path: Path) -> None:
    logits = np.random.default_rng(0).normal(size=(4, 60, 8))
    shares = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    path = place(tmp_path, "p.pt", torch_file(shares.astype(np.float32)))

    with pytest.raises(ConfigError, match="rows that sum to 1: probabilities of tokens"):
        read_load(path, NONE)
    assert read_load(path, NONE, "npy").history.tokens.shape == (4, 60, 8)


def test_tokens_behind_the_last_whole_window_are_counted_and_noted(tmp_path: Path) -> None:
    path = place(tmp_path, "r.npy", npy(IDS[:595].astype(np.int16)))
    found = read_load(path, ReadOptions(window_tokens=100))

    assert int(found.history.tokens.sum()) == 500 * 3 * 2
    note = "95 of 595 tokens, behind the last whole window of 100, are not used"
    assert note in found.notes


def test_column_that_is_the_sum_of_the_others_is_no_expert(tmp_path: Path) -> None:
    rows = [[*row, sum(row)] for row in TOKENS.tolist()]
    text = "\n".join(",".join(map(str, row)) for row in rows)
    for path in (place(tmp_path, "c.csv", text), place(tmp_path, "c.npy", npy(np.array(rows)))):
        with pytest.raises(ConfigError, match="expert 4 has as many tokens as all others together"):
            read_load(path, NONE)
        assert read_load(path, ReadOptions(num_experts=5)).history.num_experts == 5


def test_cumulative_buckets_are_no_experts(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).integers(1, 90, (3, 8)).cumsum(axis=1)
    text = "layer," + ",".join(map(str, range(8))) + "\n"
    text += "".join(f"{n + 3}," + ",".join(map(str, row)) + "\n" for n, row in enumerate(rows))
    path = place(tmp_path, "b.csv", text)

    with pytest.raises(ConfigError, match="no count falls from expert to expert"):
        read_load(path, NONE)
    assert read_load(path, ReadOptions(num_experts=8)).history.tokens.tolist() == [rows.tolist()]


def test_truncated_file_of_a_folder_is_named(tmp_path: Path) -> None:
    for rank in (0, 1):
        data = torch_file(per_pass(rank))
        place(
            tmp_path, f"expert_distribution_recorder_1.5_{rank}.pt", data[: len(data) - 90 * rank]
        )

    with pytest.raises(HistoryError, match=r"recorder_1\.5_1\.pt: no zip archive"):
        read_load(str(tmp_path), NONE)


def test_counters_that_never_fall_are_no_windows_unless_npy_is_named(tmp_path: Path) -> None:
    windows = np.random.default_rng(1).integers(1, 90, (6, 2, 8))
    path = place(tmp_path, "c.npy", npy(windows.cumsum(axis=0)))

    with pytest.raises(ConfigError, match="no count that falls: counters since a start"):
        read_load(path, NONE)
    assert read_load(path, NONE, "npy").history.num_windows == 6
    assert read_load(place(tmp_path, "w.npy", npy(windows)), NONE).history.num_windows == 6


@pytest.mark.parametrize("empty", [[], [4]], ids=["a restart", "a restart and an empty poll"])
def test_counters_that_a_restart_begins_anew_are_no_windows(
    tmp_path: Path, empty: list[int]
) -> None:
    windows = np.random.default_rng(1).integers(1, 90, (12, 2, 8))
    counters = np.concatenate([windows[:7].cumsum(axis=0), windows[7:].cumsum(axis=0)])
    counters[empty] = 0

    with pytest.raises(ConfigError, match="no count that falls in most steps: counters since"):
        read_load(place(tmp_path, "c.npy", npy(counters)), NONE)
    windows[1::2] = 0  # busy windows between idle ones
    assert read_load(place(tmp_path, "w.npy", npy(windows)), NONE).history.num_windows == 12


def test_routing_ids_that_are_padded_with_zeros_are_no_counts(tmp_path: Path) -> None:
    ids = np.random.default_rng(1).permuted(np.tile(np.arange(32), (512, 4, 1)), axis=2)[..., :8]
    ids[200:260] = 0

    with pytest.raises(ConfigError, match="padded with 0 in place of -1"):
        read_load(place(tmp_path, "r.npy", npy(ids.astype(np.int64))), NONE)
    with pytest.raises(HistoryError, match=r"names experts .* different ones, -1 for padding"):
        read_load(place(tmp_path, "r.npy", npy(ids.astype(np.int64))), NONE, "vllm-routing")


def test_raw_routing_with_a_wrong_shape_names_the_token(tmp_path: Path) -> None:
    path = place(tmp_path, "r.bin", IDS.astype("<i4").tobytes())
    right = read_load(path, ReadOptions(num_layers=3, top_k=2))

    assert right.history.tokens.tolist() == COUNTED
    with pytest.raises(HistoryError, match="expected different ones"):
        read_load(path, ReadOptions(num_layers=2, top_k=3))


def test_rows_without_end_are_no_layers(tmp_path: Path) -> None:
    path = place(tmp_path, "r.npy", npy(IDS[:300, 0]))

    with pytest.raises(ConfigError, match="far more rows than columns"):
        read_load(path, NONE)
    with pytest.raises(HistoryError, match="960 layers, expected at most 512"):
        read_load(place(tmp_path, "r.npy", npy(IDS[:, 0])), NONE, "npy")


def test_fractions_and_what_is_not_read_are_noted(tmp_path: Path) -> None:
    mean = read_load(place(tmp_path, "c.npy", npy(TOKENS / 3)), NONE)
    counts = json.dumps({"counts": TOKENS.tolist(), "num_experts": 16})

    assert "loads are fractions: they are scaled to whole numbers" in mean.notes
    assert "not read: num_experts" in read_load(place(tmp_path, "c.json", counts), NONE).notes


@pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "i8", "u8", "f4", "f8"])
def test_planner_refuses_an_array_of_routing_ids(dtype: str) -> None:
    topology = Topology.uniform(1, 1, 2)

    with pytest.raises(HistoryError, match=r"\[960, 3, 2\] .* routing ids .* LoadHistory\(array\)"):
        plan(IDS.astype(dtype), topology)
    assert plan(LoadHistory(IDS.astype(np.int64)), topology).target.num_experts == 2


@pytest.mark.parametrize(
    "counts",
    [
        [[[50, 10], [30, 70]]],  # too few rows for evidence
        [[[n % 7 + 1, 9 - n % 7] for _ in range(3)] for n in range(64)],  # each layer's total alike
        [[[3, 1, 2, 0]] * 4] * 30,  # experts beyond the numbers of a row: no top-k of a model
        np.random.default_rng(0).integers(400, 600, (64, 4, 8)).tolist(),  # repeats by chance
    ],
    ids=["few", "equal totals", "small", "counts"],
)
def test_planner_takes_an_array_of_small_counts(counts: Any) -> None:
    array = np.array(counts)

    made = plan(array, Topology.uniform(1, 2, -(-array.shape[2] // 2)))

    assert made.problem.history.tokens.tolist() == array.tolist()


PROBABILITIES = np.random.default_rng(2).dirichlet(np.ones(8), (4, 60))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (PROBABILITIES, "rows that sum to 1: probabilities of tokens"),
        (np.eye(8, dtype=np.int64)[IDS[:60, :, 0].T % 8], "0 and 1 alone, as many in each row"),
        (IDS[:60, 0], "far more rows than columns: tokens of one layer"),
        (
            np.random.default_rng(1).integers(1, 90, (6, 2, 8)).cumsum(axis=0),
            "no count that falls: counters since a start",
        ),
    ],
    ids=["probabilities", "one-hot", "ids of one layer", "counters"],
)
def test_planner_refuses_an_array_that_is_rather_something_else(
    values: NDArray[Any], why: str
) -> None:
    with pytest.raises(HistoryError, match=why):
        plan(values, Topology.uniform(1, 4, 2))


def test_routing_ids_with_layers_first_need_their_number_of_layers(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).random((6, 30, 64)).argsort(axis=2)[:, :, :4]
    path = place(tmp_path, "r.npy", npy(ids.astype(np.uint8)))

    with pytest.raises(ConfigError, match="6 tokens of 30 layers: as if ids were"):
        read_load(path, ReadOptions(window_tokens=2))
    assert read_load(path, ReadOptions(window_tokens=2, num_layers=30)).history.num_layers == 30


# -- long tables, numbers, headers


LONG = "layer_id,expert_id,count\n3,0,50\n3,1,10\n3,2,20\n3,3,20\n4,0,30\n4,1,30\n4,2,10\n4,3,30\n"


@pytest.mark.parametrize(
    "text",
    [
        LONG,
        "expert,tokens,layer\n"
        + "".join(f"{e},{TOKENS[row, e]},{row + 3}\n" for e in (2, 0, 3, 1) for row in (1, 0)),
        "rank,layer,expert,count\n"
        + "".join(
            f"{rank},{row + 3},{e},{TOKENS[row, e] // 2 + rank * (TOKENS[row, e] % 2)}\n"
            for rank in (0, 1)
            for row in (0, 1)
            for e in range(4)
        ),
    ],
    ids=["in order", "other order", "by rank"],
)
def test_long_table_is_counts_by_layer_and_expert(tmp_path: Path, text: str) -> None:
    found = read_load(place(tmp_path, "t.csv", text), NONE)

    assert found.history.tokens.tolist() == [TOKENS.tolist()]
    assert found.layers == as_layers([3, 4])


def test_folder_of_long_tables_is_summed_over_ranks(tmp_path: Path) -> None:
    place(tmp_path, "rank0.csv", LONG)
    place(tmp_path, "rank1.csv", "layer_id,expert_id,count\n4,7,5\n")  # what was routed there alone
    found = read_load(str(tmp_path), NONE)

    expected = np.zeros((2, 8), dtype=int)
    expected[:, :4] = TOKENS
    expected[1, 7] += 5
    assert found.history.tokens.tolist() == [expected.tolist()]
    assert "2 files are summed: one of each rank" in found.notes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (LONG + "3,0,50\n", "layer 3, expert 0 stand in two rows"),
        ("layer,expert\n3,0\n3,1\n", "without a count, expected layer, expert and count"),
        ("layer;0;1\n3;5;1\n", "commas between cells"),
        (LONG.replace("count\n", "count,step\n", 1).replace("0\n", "0,1\n"), "at most rank"),
        ("layer,0,1,3\n3,1,2,3\n", "column '3' of the header, expected the experts 0..2"),
        ("layer,0,1,total\n3,1,2,3\n", "column 'total' of the header"),
        (",0,1\n0,5,1\n1,2,4\n", "column '' of the header"),
        ("0,1,2\n5,1,2\n4,2,2\n", "row 1 is 0, 1, ...: numbers of experts"),
        ("3,4,5,6\n9,1,2,5\n4,2,8,3\n", "row 1 is 3, 4, ...: numbers of experts or of layers"),
        ("3,50,10\n4,30,30\n", "column 1 is 3, 4, ...: numbers of layers"),
        ("layer,0,1\n3,5\n", "row 2 has 2 cells, expected 3"),
        ("layer,0,1\n3,5,1.5\n", r"row 2, column 3 is '1\.5', expected a whole number"),
    ],
)
def test_table_with_a_second_reading_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(HistoryError, match=why):
        read_load(place(tmp_path, "t.csv", text), NONE)


def test_long_table_from_expert_1_asks_and_its_missing_pairs_are_noted(tmp_path: Path) -> None:
    path = place(tmp_path, "t.csv", "layer,expert,count\n3,1,5\n3,2,4\n4,1,9\n")

    with pytest.raises(ConfigError, match=r"experts 1\.\.2, none is 0"):
        read_load(path, NONE)
    found = read_load(path, ReadOptions(num_experts=3))
    assert found.history.tokens.tolist() == [[[0, 5, 4], [0, 9, 0]]]
    assert "3 of 6 pairs of layer and expert are not in the table: taken as 0" in found.notes


def test_files_with_the_same_counts_are_noted(tmp_path: Path) -> None:
    for name in ("a1.csv", "a2.csv"):
        place(tmp_path, name, "layer,0,1\n3,5,1\n")
    notes = read_load(str(tmp_path), NONE).notes

    assert "1 file of 2 have the same counts as another" in notes


def test_ascend_map_with_devices_in_another_order_is_noted(tmp_path: Path) -> None:
    text = ASCEND_JSON.replace(b'"device_id": 0', b'"device_id": 7')
    found = read_placement(place(tmp_path, "m.json", text), NONE)

    assert any("a device_id differs from it" in note for note in found.notes)


def test_header_in_another_order_gives_the_same_counts(tmp_path: Path) -> None:
    text = "layer,expert_2,expert_0,expert_3,expert_1\n3,20,50,20,10\n4,10,30,30,30\n"

    assert read_load(place(tmp_path, "t.csv", text), NONE).history.tokens[0].tolist() == (
        TOKENS.tolist()
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", '{"counts": [[162554.0, 9e2], [900, 162554]], "layer_ids": [3.0, 4]}'),
        ("c.json", "[[162554.0, 9e2], [9E+2, 162554]]"),
        ("c.json", '{"logical_count": [[162554.0, 9e2], [900, 162554]]}'),
        ("c.csv", "1.62554e5,9e2\n900.0,162554\n"),
        ("c.csv", "layer,0,1\n3.0,162554.0,9e2\n4,900,162554\n"),
    ],
)
def test_whole_numbers_written_as_floats_are_counts(tmp_path: Path, name: str, text: str) -> None:
    found = read_load(place(tmp_path, name, text), NONE)

    assert found.history.tokens.tolist() == [[[162554, 900], [900, 162554]]]


# -- statements


def test_statement_that_contradicts_a_file_is_refused_for_each_format(tmp_path: Path) -> None:
    refused = {}
    for name, (files, options) in seeds().items():
        (folder := tmp_path / name.replace("/", "-")).mkdir()
        path = write_seed(folder, files)
        found = read(path, options)
        is_load = isinstance(found, LoadFile)
        history_or_placement: Any = found.history if is_load else found.placement  # type: ignore[union-attr]
        experts = history_or_placement.num_experts
        is_routing = is_load and found.top_k is not None  # type: ignore[union-attr]
        is_padded = is_routing or name == "csv/long"  # by design: none of these counts anything
        wrong = {"num_experts": experts - 1 if is_padded else 4 * experts}
        wrong["layer_ids"] = tuple(range(40, 41 + len(found.layers.ids)))  # type: ignore[assignment]
        wrong["num_ranks"] = 5 if found.num_ranks is not None else None  # type: ignore[assignment]
        if found.layers.num_hidden is not None or found.layers.axis == "model":
            wrong["num_hidden"] = 1
        if not is_load:
            wrong["num_redundant"] = 77
        for option, value in wrong.items():
            if value is None:
                continue
            with pytest.raises(EplbError) as error:
                read(path, ReadOptions(**{**vars(options), option: value}))
            refused[name, option] = str(error.value)
            assert path in str(error.value)

    assert len(refused) > 3 * len(seeds())


@pytest.mark.parametrize("target", ["sglang", "vllm", "trtllm", "ascend", "eplb"])
def test_written_placement_that_a_statement_contradicts_is_refused(
    tmp_path: Path, target: str
) -> None:
    held = np.array([[0, 1, 2, 3]])
    file = PlacementFile(Placement(held, 4), as_layers([3]), num_ranks=2)

    with pytest.raises(ConfigError, match="has 2 ranks, expected 4 as --ranks states"):
        write_placement(file, target, tmp_path / "o", WriteOptions(4))
    with pytest.raises(ConfigError, match="layer 3 of a model of 2 layers"):
        write_placement(file, target, tmp_path / "o", WriteOptions(2, 2))
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("target", ["counts", "vllm-load", "eplb-trace"])
def test_written_load_has_the_ranks_that_are_stated(tmp_path: Path, target: str) -> None:
    file = LoadFile(LoadHistory(TOKENS[None]), rows_in_order(2))
    name = {"counts": "o.json", "vllm-load": "o.jsonl", "eplb-trace": "o"}[target]
    write_load(file, target, tmp_path / name, WriteOptions(4))

    assert read_load(str(tmp_path / name), NONE).num_ranks == (None if target == "counts" else 4)
    with pytest.raises(ConfigError, match="has 2 ranks, expected 4"):
        write_load(
            LoadFile(file.history, file.layers, num_ranks=2),
            target,
            tmp_path / name,
            WriteOptions(4),
        )


def test_experts_without_a_token_in_any_layer_are_counted(tmp_path: Path) -> None:
    counts = np.zeros((2, 16), dtype=int)
    counts[:, :4] = TOKENS
    told = read_load(place(tmp_path, "c.npy", npy(counts)), NONE).notes

    assert "12 experts of 16 have no token in any layer: 4..15" in told


# -- layers


def dump(rows: NDArray[Any]) -> bytes:
    return torch_file({"rank": 0, "logical_count": rows.astype(np.int32)})


def test_rows_without_tokens_behind_a_moe_layer_need_layer_ids(tmp_path: Path) -> None:
    zero = np.zeros((1, 4), dtype=int)
    rows = np.concatenate([zero, TOKENS, zero, TOKENS[:1]])[None]
    path = place(tmp_path, "d.pt", dump(rows))

    with pytest.raises(ConfigError, match=r"layers 3 have no tokens.*--layer-ids"):
        read_load(path, NONE)
    stated = read_load(path, ReadOptions(layer_ids=(1, 2, 4)))
    assert stated.history.tokens[0].tolist() == [*TOKENS.tolist(), TOKENS[0].tolist()]
    assert stated.layers.ids == (1, 2, 4)


def test_many_rows_without_tokens_first_are_another_stage(tmp_path: Path) -> None:
    for dense, is_read in ((3, True), (30, False)):
        rows = np.concatenate([np.zeros((dense, 4), dtype=int), TOKENS])[None]
        path = place(tmp_path, "d.pt", dump(rows))
        if is_read:
            assert read_load(path, NONE).layers.ids == (3, 4)
        else:
            with pytest.raises(ConfigError, match="those of another stage"):
                read_load(path, NONE)


@pytest.mark.parametrize("name", ["c.npy", "c.csv", "c.json", "c.npz", "c.pt"])
def test_zero_rows_of_a_table_in_order_need_layer_ids(tmp_path: Path, name: str) -> None:
    rows = np.concatenate([np.zeros((3, 4), dtype=int), TOKENS])
    write: dict[str, Callable[[], bytes]] = {
        "c.npy": lambda: npy(rows),
        "c.csv": lambda: "\n".join(",".join(map(str, row)) for row in rows.tolist()).encode(),
        "c.json": lambda: json.dumps(rows.tolist()).encode(),
        "c.npz": lambda: npz(load=rows),
        "c.pt": lambda: torch_file(rows),
    }
    path = place(tmp_path, name, write[name]())

    with pytest.raises(ConfigError, match="layers 0-2 have no tokens"):
        read_load(path, NONE)
    found = read_load(path, ReadOptions(layer_ids=(3, 4)))
    assert found.history.tokens.tolist() == [TOKENS.tolist()]
    assert read_load(path, ReadOptions(layer_ids=(0, 1, 2, 3, 4))).history.num_layers == 5


def test_draft_layers_behind_those_of_the_model_are_dropped_and_noted(tmp_path: Path) -> None:
    text = "layer,0,1\n3,5,1\n4,2,4\n61,3,3\n"
    path = place(tmp_path, "c.csv", text)
    found = read_load(path, ReadOptions(layer_ids=(3, 4), model="m"))

    assert found.history.tokens.tolist() == [[[5, 1], [2, 4]]]
    note = "layers 61 behind those of the model have tokens: taken as draft (MTP) layers"
    assert f"{note}; TensorRT-LLM plans them too, by --layer-ids" in found.notes
    assert read_load(path, ReadOptions(layer_ids=(3, 4, 61))).history.num_layers == 3
    with pytest.raises(ConfigError, match="layers 3 have tokens, expected none; --model m"):
        read_load(path, ReadOptions(layer_ids=(4, 61), model="m"))


def test_last_layer_with_other_totals_may_be_a_draft_layer(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).multinomial(4096, np.full(8, 1 / 8), (5, 4))
    counts *= np.array([3, 1, 2, 5, 4])[:, None, None]
    counts[:, -1] //= 2
    found = read_load(place(tmp_path, "c.npy", npy(counts)), NONE)

    assert found.history.tokens.tolist() == counts.tolist()
    assert "or layer 3 be a draft (MTP) layer: then leave out its row" in found.notes[-1]


def test_hidden_rows_are_neither_valid_for_trtllm_nor_written_for_it(tmp_path: Path) -> None:
    file = read_placement(place(tmp_path, "l.json", b'{"physical_to_logical_map": [[0, 1]]}'), NONE)

    wrong = [one.code for one in findings(file, "trtllm", TargetDeployment(2)) if one.is_error]
    assert wrong == ["dense-rows"]
    with pytest.raises(ConfigError, match="does not tell whether a row is a dense layer"):
        write_placement(file, "trtllm", tmp_path / "o.yaml", WriteOptions(2))


# -- axes


@pytest.mark.parametrize("axes", [(0, 2, 1), (1, 0, 2)])
def test_counts_with_exchanged_axes_are_refused(tmp_path: Path, axes: tuple[int, ...]) -> None:
    counts = np.array([TOKENS, 2 * TOKENS[::-1], 3 * TOKENS])
    path = place(tmp_path, "c.npy", npy(counts.transpose(axes)))

    with pytest.raises(ConfigError, match=r"as if axes were|may be routing ids"):
        read_load(path, NONE)
    if axes == (1, 0, 2):  # the number of experts does not tell layers from windows
        with pytest.raises(ConfigError, match=r"\[layers, windows, experts\].*or --layer-ids"):
            read_load(path, ReadOptions(num_experts=4))
        assert read_load(path, ReadOptions(layer_ids=(3, 4, 5))).history.num_layers == 3


def test_table_with_a_row_for_each_expert_is_no_load(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).multinomial(5000, np.full(16, 1 / 16), 3)  # [layers, experts]
    path = place(tmp_path, "c.npy", npy(rows.T))

    with pytest.raises(ConfigError, match=r"\[windows, experts, layers\].*or --experts"):
        read_load(path, NONE)
    with pytest.raises(ConfigError, match="has 3 experts, expected 16 as --experts"):
        read_load(path, ReadOptions(num_experts=16))


def test_loads_of_slots_by_rank_are_no_windows_of_layers(tmp_path: Path) -> None:
    slots = np.array([[[70, 10], [10, 10]], [[20, 20], [30, 30]], [[5, 5], [50, 40]]])
    path = place(tmp_path, "moe_load.pt", torch_file(slots))  # [layers, ranks, slots]

    with pytest.raises(ConfigError, match=r"as if axes were \[layers, ranks, slots\]"):
        read_load(path, NONE)


def test_quoted_cells_are_read_and_another_separator_is_refused(tmp_path: Path) -> None:
    quoted = '"layer","0","1"\r\n"3","5","1"\r\n"4","2","4"\r\n'

    assert read_load(place(tmp_path, "q.csv", quoted), NONE).history.tokens.tolist() == [
        [[5, 1], [2, 4]]
    ]
    with pytest.raises(HistoryError, match="expected a whole number"):
        read_load(place(tmp_path, "s.csv", "layer;0;1\n3;5;1\n"), NONE)


def test_a_row_that_stands_twice_needs_layer_ids(tmp_path: Path) -> None:
    path = place(tmp_path, "c.npy", npy(np.array([*TOKENS, TOKENS[1]])))

    with pytest.raises(ConfigError, match="2 layers have the same counts"):
        read_load(path, NONE)
    assert read_load(path, ReadOptions(layer_ids=(3, 4, 5))).history.num_layers == 3


# -- folders


def test_dumps_of_one_shape_are_windows_in_order_of_time(tmp_path: Path) -> None:
    parts = [TOKENS * n for n in (3, 1, 2)]
    for time, part in zip(("9.5", "100.25", "20.0"), parts, strict=True):
        place(tmp_path, f"expert_distribution_recorder_{time}.pt", dump(part[None]))
    found = read_load(str(tmp_path), NONE)

    assert found.history.tokens.tolist() == [parts[n].tolist() for n in (0, 2, 1)]


def test_dumps_of_each_rank_pair_in_order_of_time(tmp_path: Path) -> None:
    for rank in (0, 1):
        for time in (1.5, 2.5, 3.5)[: 3 - rank]:  # the last one is of one rank alone
            name = f"expert_distribution_recorder_{time + rank / 100}_{rank}.pt"
            place(tmp_path, name, torch_file(per_pass(rank)))
    found = read_load(str(tmp_path), NONE)

    assert found.history.tokens.tolist() == [[[10, 2, 0, 4], [8, 6, 2, 0]]] * 4
    assert "1 files are of dumps that not all ranks have: not used" in found.notes
    with pytest.raises(HistoryError, match="not all ranks have"):
        read_load(str(tmp_path), ReadOptions(strict=True))


def test_dumps_of_two_stages_are_joined_by_their_layers(tmp_path: Path) -> None:
    first, second = np.zeros((3, 5, 4), dtype=int), np.zeros((2, 5, 4), dtype=int)
    first[:, 1:3] = [TOKENS, 2 * TOKENS, 3 * TOKENS]
    second[:, 3:] = [TOKENS[::-1], 2 * TOKENS[::-1]]
    place(tmp_path, "expert_distribution_recorder_1.5.pt", dump(first))
    place(tmp_path, "expert_distribution_recorder_1.6.pt", dump(second))
    found = read_load(str(tmp_path), NONE)

    assert found.layers.ids == (1, 2, 3, 4)
    assert found.history.tokens.tolist() == [
        [*(n * TOKENS).tolist(), *(n * TOKENS[::-1]).tolist()] for n in (1, 2)
    ]
    for said in ("2 stages are joined", "1 of 3 windows are not in all files: not used"):
        assert any(said in note for note in found.notes)
    with pytest.raises(HistoryError, match="1 of 3 windows"):
        read_load(str(tmp_path), ReadOptions(strict=True))


def test_tables_of_ranks_are_summed_and_those_of_stages_joined(tmp_path: Path) -> None:
    for rank in (0, 1):
        place(tmp_path, f"stage_a_rank{rank}.csv", "layer,0,1\n3,5,1\n")
        place(tmp_path, f"stage_b_rank{rank}.csv", f"layer,0,1\n4,{rank},2\n")
    found = read_load(str(tmp_path), NONE)

    assert found.history.tokens.tolist() == [[[10, 2], [1, 4]]]
    assert found.layers.ids == (3, 4)


def test_trtllm_stages_are_joined_and_iterations_that_ranks_lack_not_used(tmp_path: Path) -> None:
    for rank, layer in ((0, 3), (1, 3), (2, 4)):
        steps = range(100, 103 if rank else 102)
        counts = {f"{step}_{layer}": np.array([rank + 1, step - 99]) for step in steps}
        place(tmp_path, f"rank{rank}.safetensors", save(counts))
    place(tmp_path, "meta_info.json", '{"num_experts": 2}')
    found = read_load(str(tmp_path), NONE)

    assert found.history.tokens.tolist() == [[[3, 2], [3, 1]], [[3, 4], [3, 2]]]
    assert found.layers.ids == (3, 4)
    assert "1 of 3 iterations are not in all files: not used" in found.notes
    assert "files of ranks 0..2 are summed: whether one more is missing is not told" in found.notes
    with pytest.raises(HistoryError, match="1 of 3 iterations"):
        read_load(str(tmp_path), ReadOptions(strict=True))


@pytest.mark.parametrize("name", ["t_rank{}.csv", "expert_distribution_recorder_1.5_{}.pt"])
def test_file_of_a_rank_between_others_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    for rank in (0, 2):
        data = b"layer,0,1\n3,5,1\n" if name.endswith("csv") else torch_file(per_pass(rank))
        (tmp_path / name.format(rank)).write_bytes(data)

    with pytest.raises(HistoryError, match="no file of rank 1, expected those of ranks 0, 1, 2"):
        read_load(str(tmp_path), NONE)


def test_passes_of_ranks_are_summed_by_their_number(tmp_path: Path) -> None:
    for rank, passes in ((0, (7, 8)), (1, (8, 9))):  # a pass of the engine is no place in a file
        record = per_pass(rank)
        for part, number in zip(record["records"], passes, strict=True):
            part["forward_pass_id"] = number
        record["records"][0]["global_physical_count"] = PHYSICAL * (rank + 1)
        place(tmp_path, f"expert_distribution_recorder_1.5_{rank}.pt", torch_file(record))
    found = read_load(str(tmp_path), NONE)

    logical = np.array([[5, 1, 0, 2], [4, 3, 1, 0]])  # of PHYSICAL by its map
    assert found.history.tokens.tolist() == [((1 + 2) * logical).tolist()]
    assert found.history.first_step.tolist() == [8]
    assert "2 of 3 passes are not in all 2 files: not used" in found.notes


def test_folder_of_two_kinds_is_refused(tmp_path: Path) -> None:
    place(tmp_path, "a.csv", "5,1\n2,4\n")
    place(tmp_path, "b.json", "[[5, 1], [2, 4]]")

    with pytest.raises(HistoryError, match=r"b\.json is counts, a\.csv is csv"):
        read_load(str(tmp_path), NONE)


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("c.parquet", b"PAR1", r"another table, expected it saved as \.csv with the columns layer"),
        ("rank0.safetensors", save({"1_3": np.arange(4)}), "expected the folder of TensorRT-LLM"),
        ("c.pkl", b"\x80\x04.", "a pickle, which may run code, expected an array"),
        ("c.xyz", b"1", "of no known name, expected --format with one of"),
        ("r.npy", npy(np.full((2, 3, 4, 2), -1, np.int16)), r"\(2, 3, 4, 2\), expected \[layers"),
    ],
)
def test_file_that_is_no_format_says_what_is(
    tmp_path: Path, name: str, data: bytes, why: str
) -> None:
    with pytest.raises(EplbError, match=why):
        read(place(tmp_path, name, data), NONE)


# -- LMDeploy, omni-infer, expert maps, torch


def lmdeploy(counts: NDArray[Any], step: int, **more: Any) -> bytes:
    total = counts.sum(axis=1)
    record = {"counts": counts, "total_tokens": total, "step": step, "rank": 0}
    return torch_file(record | {"balancedness": np.ones(2, dtype=np.float32)} | more)


def test_lmdeploy_files_that_count_from_the_start_are_windows(tmp_path: Path) -> None:
    for step, times in ((9, 1), (40, 5), (100, 7)):
        data = lmdeploy(TOKENS * times, step)
        place(tmp_path, f"rank0_step{step}_expert_counts.pt", data)
    found = read_load(str(tmp_path), NONE)
    alone = read_load(str(tmp_path / "rank0_step40_expert_counts.pt"), NONE)

    assert found.history.tokens.tolist() == [(n * TOKENS).tolist() for n in (1, 4, 2)]
    assert found.history.last_step.tolist() == [9, 40, 100]
    assert alone.history.tokens.tolist() == [(5 * TOKENS).tolist()]
    assert "LMDeploy" in alone.notes[0]


def test_lmdeploy_file_of_nested_lists_and_counts_that_fall(tmp_path: Path) -> None:
    for step, times in ((9, 2), (40, 1)):
        name = f"rank0_step{step}_experts_counts.json"
        path = place(tmp_path, name, json.dumps((TOKENS * times).tolist()))

    assert read_load(path, NONE).history.tokens.tolist() == [TOKENS.tolist()]
    with pytest.raises(HistoryError, match="counts of step 40 are not above"):
        read_load(str(tmp_path), NONE)
    wrong = lmdeploy(TOKENS, 9, total_tokens=np.array([1, 2]))
    with pytest.raises(HistoryError, match="expected the sums of counts"):
        read_load(place(tmp_path, "rank0_step1_expert_counts.pt", wrong), NONE)


def test_pattern_of_omni_infer_is_a_placement(tmp_path: Path) -> None:
    pattern = np.array([[[1, 1, 0, 1], [1, 1, 0, 0]], [[0, 1, 1, 0], [0, 0, 1, 1]]])
    found = read_placement(place(tmp_path, "p.npy", npy(pattern)), NONE)

    assert found.placement.slot_to_expert.tolist() == [[0, 1, 3, 1, 2, -1], [0, 1, -1, 2, 3, -1]]
    assert (found.num_ranks, found.placement.num_experts) == (2, 4)
    assert "omni-infer" in found.notes[0]
    assert any("3 slots are empty" in note for note in found.notes)
    lost = place(tmp_path, "p.npy", npy(pattern * [1, 1, 1, 0]))
    with pytest.raises(PlacementError, match="expert 3 has no slot"):
        read_placement(lost, NONE, "omni")


def test_expert_map_with_minus_one_is_a_placement(tmp_path: Path) -> None:
    slots = np.array([[[0, 1, -1, -1], [-1, -1, 1, 0]]])
    found = read_placement(place(tmp_path, "m.pt", torch_file(slots)), NONE)

    assert found.placement.slot_to_expert.tolist() == [[0, 1, 3, 2]]
    for wrong in (np.array([[5, -1, 3, 2]]), np.array([[[0, 2, -1, -1], [-1, -1, 1, 0]]])):
        with pytest.raises(HistoryError, match=r"has -1, expected counts.*--current"):
            read(place(tmp_path, "m.pt", torch_file(wrong)), NONE)


def test_table_of_experts_by_slot_is_no_load(tmp_path: Path) -> None:
    held = np.array([[0, 1, 2, 3, 0, 1], [0, 2, 0, 1, 0, 3]])

    for name, data in (("m.npy", npy(held)), ("m.pt", torch_file(held))):
        with pytest.raises(ConfigError, match="experts by slot"):
            read(place(tmp_path, name, data), NONE)


def test_bfloat16_and_parameters_are_read_as_their_counts(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    counts = torch.tensor(TOKENS)
    for value in (
        counts.to(torch.bfloat16),
        torch.nn.Parameter(counts.float(), requires_grad=False),
        counts.half(),
    ):
        torch.save(value, tmp_path / "c.pt")

        assert read_load(str(tmp_path / "c.pt"), NONE).history.tokens.tolist() == [TOKENS.tolist()]


def test_torch_file_of_the_old_format_says_what_to_do(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "c.pt"
    torch.save(torch.tensor(TOKENS), path, _use_new_zipfile_serialization=False)

    with pytest.raises(HistoryError, match=r"before torch 1\.6.*write it anew"):
        read_load(str(path), NONE)


def test_vllm_lines_with_a_step_twice_or_a_map_that_lacks_experts(tmp_path: Path) -> None:
    line = {"record_type": "eplb_load_stats", "version": 1, "step": 7}
    line |= {"expert_load": [[1, 2, 3]], "p2l_map": [[0, 1, 0]]}
    path = place(tmp_path, "d.jsonl", f"{json.dumps(line)}\n" * 2)

    with pytest.raises(HistoryError, match="line 2 has step 7 after step 7"):
        read_load(path, NONE)
    path = place(tmp_path, "d.jsonl", json.dumps(line))
    with pytest.raises(HistoryError, match=r"p2l_map\[0\] has no expert 2, expected all of 3"):
        read_load(path, ReadOptions(num_redundant=0))
