"""``eplb plan``, ``convert`` and ``validate``: from a dump to a file that an engine takes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from numpy.typing import NDArray
from typer.testing import CliRunner

from api.cli.main import app
from api.engine_plan import PlannedGroup, plan_for_engine
from eplb import ModelShape, Placement, register_policy
from telemetry.formats.table import WriteOptions, read_load, read_placement, write_placement
from telemetry.formats.types import Layers, PlacementFile, ReadOptions
from tests.support.engines.ascend_check import has_no_move_within_a_device
from tests.support.formats.seeds import torch_file

GROUP = ("--ranks", "4", "--nodes", "2", "--redundant", "4")


def eplb(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of SGLang: 6 steps, one dense and two MoE layers, 8 experts, one of them hot."""
    rng = np.random.default_rng(0)
    steps = np.zeros((6, 3, 8), dtype=np.int32)
    steps[:, 1:] = rng.poisson([2000, 100, 100, 100, 100, 100, 100, 100], (6, 2, 8))
    path = tmp_path_factory.mktemp("dump") / "stat.pt"
    path.write_bytes(torch_file({"rank": 0, "logical_count": steps}))
    return path


def figures(text: str, row: str) -> list[float]:
    (found,) = re.findall(rf"^  {row} +(.*)$", text, re.MULTILINE)
    return [float(one) for one in found.split()]


@pytest.mark.parametrize(
    ("target", "rule"),
    [
        ("sglang", "live, static"),
        ("vllm", "under even"),
        ("trtllm", "under even"),
        ("ascend", "under ascend_mod"),
        ("eplb", "under weighted"),
    ],
)
def test_plan_writes_a_file_that_its_engine_takes(
    dump: Path, tmp_path: Path, target: str, rule: str
) -> None:
    out = tmp_path / ("out.yaml" if target == "trtllm" else "out.json")
    done = eplb("plan", dump, *GROUP, "--target", target, "-o", out, "--expert-bytes", 10**9)

    assert done.exit_code == 0, done.output
    assert rule in done.output
    booked, effective, *at_start = figures(done.output, "after")
    before = figures(done.output, "before")[0]
    assert len(at_start) == (target == "sglang"), "SGLang splits otherwise at a start"
    assert 1.0 <= booked < before - 0.3
    assert 1.0 <= figures(done.output, "lower bound")[0] <= effective + 1e-3
    assert effective < before - 0.3
    assert re.search(
        r"cost from experts in order: \d+ experts move \(.*\), [\d.]+ GB, ", done.output
    )
    assert "layers 0-0" not in done.output
    told = ("--layer-ids", "1,2")
    checked = eplb("validate", out, "--target", target, *GROUP, *told)
    assert checked.exit_code == 0, checked.output


def test_plan_is_judged_under_the_rule_that_it_was_made_for(dump: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    static = eplb("plan", dump, *GROUP, "--target", "sglang", "-o", out)
    even = eplb("plan", dump, *GROUP, "--target", "sglang", "--dispatch", "even", "-o", out)

    assert "live, static" in static.output
    assert "start, static" in static.output
    assert "live, dynamic" in even.output


def test_plan_file_that_serves_worse_than_the_decision_states_both(
    dump: Path, tmp_path: Path
) -> None:
    # Ranks 0 and 1 share the hot expert 0; the format fills their empty slots with others.
    held = np.array([[0, 7, -1, 0, -1, -1, 1, 2, 3, 4, 5, 6]])
    register_policy("hot_alone", lambda _: Placement(np.repeat(held, 2, axis=0), 8))
    out = tmp_path / "out.json"

    done = eplb("plan", dump, *GROUP, "--target", "vllm", "--policy", "hot_alone", "-o", out)

    before, decided = re.findall(r"imbalance (\d\.\d+) -> (\d\.\d+)", done.output)[0]
    effective = figures(done.output, "after")[1]
    assert float(decided) < effective < float(before)
    note = r"note: under even the file as written has imbalance (.*), the plan as decided (.*):"
    stated = [float(one) for one in re.findall(note, done.output)[0]]
    assert stated == [effective, pytest.approx(float(decided), abs=1e-3)]


def test_ascend_plan_from_its_own_map_moves_no_kept_expert(dump: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    eplb("plan", dump, *GROUP, "--target", "ascend", "--policy", "random", "-o", first)
    done = eplb("plan", dump, *GROUP, "--target", "ascend", "--current", first, "-o", second)
    told = ("--layer-ids", "1,2")
    again = eplb(
        "plan", dump, *GROUP, "--target", "ascend", "--current", first, *told, "-o", second
    )

    assert (done.exit_code, again.exit_code) == (0, 0), done.output + again.output
    assert "cost from the serving placement" in again.output
    assert has_no_move_within_a_device(
        read_placement(str(first), ReadOptions()), read_placement(str(second), ReadOptions())
    )


@pytest.mark.parametrize("target", ["sglang", "ascend", "eplb"])
def test_plan_from_the_file_that_it_wrote_keeps_it(dump: Path, tmp_path: Path, target: str) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    eplb("plan", dump, *GROUP, "--target", target, "-o", first)
    again = eplb("plan", dump, *GROUP, "--target", target, "--current", first, "-o", second)

    assert "decision: KEEP" in again.output
    assert "cost: no expert moves" in again.output
    in_order = "has layers 0, 1 (ordinal), the load 1, 2 (model): taken for the same layers"
    assert (in_order in again.output) == (target == "ascend")


@pytest.mark.parametrize(
    ("held", "layers", "why"),
    [
        (np.arange(16)[None] % 8, (1,), "has 16 slots for 8 experts, the plan 12 for 8"),
        (np.arange(12)[None] % 8, (1,), "has layers 1 (model), the load 1, 2 (model)"),
        (np.tile(np.arange(12) % 8, (2, 1)), (2, 3), "has layers 2, 3 (model), the load 1, 2"),
    ],
)
def test_plan_states_why_the_serving_placement_does_not_fit(
    dump: Path, tmp_path: Path, held: np.ndarray, layers: tuple[int, ...], why: str
) -> None:
    serving = PlacementFile(Placement(held, 8), Layers(layers, "model"))
    write_placement(serving, "eplb", tmp_path / "serving.json", WriteOptions(4))
    words = ("--target", "eplb", "--current", tmp_path / "serving.json", "-o", tmp_path / "o.json")

    said = eplb("plan", dump, *GROUP, *words).output
    assert why in said
    assert said.count(": planned fresh") == 1


def test_plan_states_what_groups_on_nodes_cost_in_balance(dump: Path, tmp_path: Path) -> None:
    load = read_load(str(dump), ReadOptions(layer_ids=(1, 2)))
    model = ModelShape((1, 2), 8, 2, 1, 1, num_expert_groups=2, expert_bytes=1)
    told = {"rule": None, "policy": "auto", "expert_bytes": None, "seed": 0, "num_hidden": None}
    told |= {"source": "dump", "at_start": False}
    out = tmp_path / "out.json"

    def notes(nodes: int) -> str:
        group = PlannedGroup(4, nodes, 4)
        made = plan_for_engine(load, None, group, "vllm", out, model=model, **told)
        return "\n".join(made["notes"])

    kept, free = re.findall(r"imbalance (\S+) as decided, (\S+) with groups spread", notes(2))[0]
    assert float(free) < float(kept) - 0.3
    assert "groups" not in notes(1)


def test_windows_without_tokens_are_left_out_and_noted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    busy = rng.poisson([2000, 100, 100, 100, 100, 100, 100, 100], (6, 3, 8))
    busy[:, 1] = 0
    with_idle = np.concatenate((busy, np.zeros((2, 3, 8), dtype=np.int64)))
    np.savez(tmp_path / "busy.npz", load=busy)
    np.savez(tmp_path / "idle.npz", load=with_idle)
    note = "note: 2 of 8 windows have no tokens and are left out"

    def planned(name: str) -> str:
        words = ("--target", "eplb", "-o", tmp_path / "o.json", "--layer-ids", "0-2")
        return eplb("plan", tmp_path / name, *GROUP, *words).output

    assert figures(planned("idle.npz"), "before") == figures(planned("busy.npz"), "before")
    assert note in planned("idle.npz")
    assert "left out" not in planned("busy.npz")
    assert "note: layers 1 have no tokens in any window" in planned("busy.npz")
    words = ("--ranks", 4, "--policy", "contiguous", "--layer-ids", "0-2")
    simulated = eplb("simulate", tmp_path / "idle.npz", *words)
    assert note in simulated.output
    assert "note: layers 1 have no tokens in any window" in simulated.output


def test_convert_carries_a_placement_between_engines(dump: Path, tmp_path: Path) -> None:
    names = {"sglang": "a.json", "trtllm": "b.yaml", "vllm": "c.json", "ascend": "d.json"}
    eplb("plan", dump, *GROUP, "--target", "eplb", "-o", tmp_path / "own.json")
    own = read_placement(str(tmp_path / "own.json"), ReadOptions())
    for target, name in names.items():
        done = eplb("convert", tmp_path / "own.json", "--to", target, "-o", tmp_path / name)
        assert done.exit_code == 0, done.output
        found = read_placement(str(tmp_path / name), ReadOptions(layer_ids=(1, 2)))
        assert np.array_equal(found.placement.slot_to_expert, own.placement.slot_to_expert), target


def test_convert_of_load_keeps_its_source(dump: Path, tmp_path: Path) -> None:
    done = eplb("convert", dump, "--to", "eplb-trace", "-o", tmp_path / "trace")
    manifest = json.loads((tmp_path / "trace" / "manifest.json").read_text())

    assert done.exit_code == 0, done.output
    assert manifest["provenance"] == {"source": "stat.pt"}
    assert manifest["layer_ids"] == [1, 2]


def test_validate_lists_errors_with_status_1(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"physical_to_logical_map": [[0, 1, 2, 0, 0, 0]]}')

    done = eplb("validate", path, "--target", "sglang", "--ranks", "4")

    assert done.exit_code == 1
    assert "error divides: 6 slots do not divide by 4 ranks" in done.output


@pytest.mark.parametrize(
    ("target", "last"),
    [
        ("eplb", "eplb accepts it"),
        ("vllm", "a build of vllm with this format accepts it"),
    ],
)
def test_validate_names_the_builds_that_accept_the_format(
    dump: Path, tmp_path: Path, target: str, last: str
) -> None:
    out = tmp_path / "out.json"
    planned = eplb("plan", dump, *GROUP, "--target", target, "-o", out)

    done = eplb("validate", out, "--target", target, *GROUP, "--layer-ids", "1,2")

    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == last
    unread = "vLLM 0.33.0 reads no mapping; the format is that of its PR 41141"
    assert (f"\nwarning experimental: {unread}\n" in done.output) == (target == "vllm")
    assert (f"\nnote: {unread}\n" in planned.output) == (target == "vllm")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("plan", "none.pt", *GROUP, "--target", "vllm", "-o", "o"), "none.pt does not exist"),
        (("plan", "DUMP", "--ranks", "3", "--target", "vllm", "-o", "o"), "on 3 ranks"),
        (
            ("plan", "DUMP", "--ranks", "4", "--nodes", "3", "--target", "vllm", "-o", "o"),
            "3 nodes",
        ),
        (("plan", "DUMP", *GROUP, "--target", "vllm", "--model", "x", "-o", "o"), "unknown model"),
        (
            ("plan", "DUMP", *GROUP, "--target", "vllm", "--model", "mixtral-8x7b", "-o", "o"),
            "--model mixtral-8x7b has MoE layers 0-31: the file is of another model",
        ),
        (
            ("plan", "DUMP", *GROUP, "--target", "vllm", "--current", "other.json", "-o", "o"),
            "other.json: the file has 6 experts, expected 8",
        ),
        (("plan", "DUMP", *GROUP, "--target", "vllm", "-o", "/nowhere/o"), "cannot be written"),
        (
            ("plan", "DUMP", *GROUP, "--target", "vllm", "--policy", "x", "-o", "o"),
            "unknown policy",
        ),
        (
            ("plan", "none.csv", *GROUP, "--target", "vllm", "-o", "o"),
            "all counts of its 1 window are 0",
        ),
        (("convert", "DUMP", "--to", "vllm", "-o", "o"), "use eplb plan"),
        (("convert", "DUMP", "--to", "x", "-o", "o"), "load is not written as 'x'"),
        (("validate", "DUMP", "--target", "vllm"), "holds load without a map"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    dump: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    other = PlacementFile(Placement(np.arange(12)[None] % 6, 6), Layers((0,), "model"))
    write_placement(other, "eplb", Path("other.json"), WriteOptions(4))
    Path("none.csv").write_text(f"layer,{','.join(map(str, range(8)))}\n3{',0' * 8}\n")

    done = eplb(*(dump if one == "DUMP" else one for one in arguments))

    assert done.exit_code == 2, done.output
    assert why in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


COMMANDS = {
    "plan": ("--ranks", 4, "--target", "eplb", "-o", "o.json"),
    "convert": ("--to", "counts", "-o", "o.json"),
    "validate": ("--target", "eplb"),
    "simulate": ("--ranks", 4, "--policy", "contiguous"),
    "sweep": ("--ranks", 4, "--policy", "none", "-o", "grid"),
    "recommend": ("--model", "mixtral-8x7b", "--ranks", 4),
    "shadow": ("--engine", "vllm", "--ranks", 4),
}


TWENTY_EXPERTS = {
    "num_hidden_layers": 3,
    "num_experts": 20,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize("command", list(COMMANDS))
@pytest.mark.parametrize(
    ("name", "stated", "why"),
    [
        ("ids.npy", (), "may be routing ids"),
        ("counts.json", ("--experts", 16), "has 8 experts, expected 16"),
        ("counts.json", ("--layer-ids", "5-9"), "expected 5: 5-9"),
        ("counts.json", ("--format", "csv"), "no row of counts, expected"),
        ("gap.json", (), "layers 1 have no tokens"),
    ],
)
def test_each_command_refuses_what_it_would_take_for_another_load(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    name: str,
    stated: tuple[object, ...],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = COMMANDS[command]
    if command == "recommend" and stated[:1] != ("--format",):
        words = (*words, *(("--layer-ids", "0-1") if not stated else ()))
        if name == "gap.json" or stated[:1] == ("--experts",):
            pytest.skip("the model that it needs states both")
        if name == "ids.npy":
            pytest.skip("the model states its experts, which decides")
    counts = np.random.default_rng(0).poisson(500, (2, 8))
    Path("counts.json").write_text(json.dumps(counts.tolist()))
    Path("gap.json").write_text(json.dumps([counts[0].tolist(), [0] * 8, counts[1].tolist()]))
    ids = np.random.default_rng(0).random((960, 3, 16)).argsort(axis=2)[:, :, :2]
    np.save("ids.npy", ids)

    done = eplb(command, name, *words, *stated)

    said = " ".join((done.stderr + done.stdout).split())
    assert done.exit_code == 2, done.output
    assert why in said


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_commands_count_routing_ids_of_the_type_that_vllm_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ids = np.random.default_rng(0).random((960, 3, 16)).argsort(axis=2)[:, :, :2]
    np.save("r.npy", ids.astype(np.uint8))

    done = eplb(command, "r.npy", *COMMANDS[command])

    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "taken as routing ids of 16 experts, top-2, format vllm-routing, vLLM" in said


@pytest.mark.parametrize("is_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("command", [one for one in COMMANDS if one != "validate"])
def test_each_command_says_that_stated_experts_have_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, is_json: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    ids = np.random.default_rng(0).random((960, 3, 16)).argsort(axis=2)[:, :, :2]
    np.save("r.npy", ids.astype(np.uint8))
    words = (*COMMANDS[command], "--experts", 20)
    if command == "recommend":
        Path("config.json").write_text(json.dumps(TWENTY_EXPERTS))
        words = ("--model", "config.json", "--ranks", 4, "--kv-token-bytes", 1000)

    done = eplb(command, "r.npy", *words, *(["--json"] if is_json else []))

    assert done.exit_code == 0, done.output
    said = " ".join((done.stdout if is_json else done.output).split())
    assert "4 experts of 20 have no token in any layer: 16..19" in said
    if is_json:
        assert "4 experts of 20" in json.dumps(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("p.npy", np.array([[[1, 1, 0, 0]] * 2, [[0, 0, 1, 1]] * 2])),  # [devices, layers, experts]
        ("m.npy", np.array([[[0, 1, -1, -1], [-1, -1, 0, 1]]] * 2)),  # [layers, ranks, experts]
    ],
    ids=["pattern", "expert map"],
)
def test_table_by_device_is_a_placement_for_convert_and_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, table: NDArray[np.int64]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save(name, table)
    Path("load.json").write_text(json.dumps([[90, 60, 5, 5], [60, 90, 5, 5]]))

    done = eplb("convert", name, "--to", "vllm", "-o", "o.json")
    planned = eplb(
        "plan", "load.json", "--ranks", 2, "--target", "vllm", "-o", "p.json", "--current", name
    )

    assert done.exit_code == planned.exit_code == 0, done.output + planned.output
    rows = json.loads(Path("o.json").read_text())["initial_global_assignments"]
    assert rows == {"0": [0, 1, 2, 3], "1": [0, 1, 2, 3]}
    # Rank 0 holds experts 0 and 1: 150 of 160 tokens, where 80 are the mean of two ranks.
    assert figures(planned.output, "before")[0] == 1.875


def test_convert_says_the_windows_layers_and_experts_that_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("c.npy", np.random.default_rng(0).poisson(500, (7, 3, 8)))
    done = eplb("convert", "c.npy", *COMMANDS["convert"])
    found = eplb("convert", "c.npy", *COMMANDS["convert"], "--json")

    assert done.stdout.splitlines()[0] == "load: 7 windows, 3 layers x 8 experts"
    assert json.loads(found.stdout)["load"] == "7 windows, 3 layers x 8 experts"


def test_plan_writes_into_a_pipe_and_judges_what_it_wrote(dump: Path, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    done = eplb("plan", dump, *GROUP, "--target", "sglang", "-o", path)
    with os.fdopen(reader, "rb") as file:
        rows = json.loads(file.read())["physical_to_logical_map"]

    assert done.exit_code == 0, done.output
    assert [sorted(set(row)) for row in rows] == [list(range(8))] * 3
    assert len(figures(done.output, "after")) == 3


def test_simulate_replays_a_dump(dump: Path) -> None:
    done = eplb("simulate", dump, "--ranks", "4", "--policy", "contiguous")

    assert done.exit_code == 0, done.output
