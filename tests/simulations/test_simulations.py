"""The simulator: traces in, honest comparisons out."""

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from api.cli.main import app
from eplb import CostModel, Topology, imbalance
from eplb.core.load import fluctuation
from eplb.errors import ConfigError, HistoryError
from simulations import Scenario, generate, load_trace, replay, replay_all
from simulations.pages.of_commands import comparison_page
from simulations.report import conclusions, summary
from simulations.workloads import windows_named
from telemetry.formats.bounded import read_arrays
from tests.support.repository import ROOT

DATA = Path(os.environ.get("EPLB_DATA", ROOT.parent / "shared" / "data"))

# Two layers, four tokens, one expert each.
IDS = np.array([[[0], [0], [1], [2]], [[2], [2], [2], [0]]])


def written(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path / "trace.npz", **arrays)
    return path / "trace.npz"


def test_tokens_are_counted_by_window_layer_and_expert(tmp_path: Path) -> None:
    trace = written(tmp_path, expert_ids=IDS)

    history = load_trace(trace, window_tokens=2, layout="layers-first")

    assert history.tokens.tolist() == [[[2, 0, 0], [0, 0, 2]], [[0, 1, 1], [1, 0, 1]]]


def test_both_layouts_give_the_same_windows_and_a_doubtful_one_is_asked_for(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 4, size=(2, 20, 3))
    first = load_trace(written(tmp_path, expert_ids=ids), window_tokens=5)

    second = load_trace(written(tmp_path, expert_ids=ids.transpose(1, 0, 2)), window_tokens=5)
    by_lengths = load_trace(
        written(tmp_path, expert_ids=IDS, request_len=np.array([1, 3])), window_tokens=2
    )

    assert first.tokens.tolist() == second.tokens.tolist()
    assert by_lengths.num_layers == 2
    with pytest.raises(ConfigError, match="layers-first or tokens-first"):
        load_trace(written(tmp_path, expert_ids=IDS), window_tokens=2)


def test_padding_is_not_load(tmp_path: Path) -> None:
    ids = np.full((1, 8, 2), -1)
    ids[0, :, 0] = 1

    history = load_trace(written(tmp_path, expert_ids=ids), window_tokens=4, num_experts=3)

    assert history.total().tolist() == [[0, 8, 0]]


def test_counted_windows_are_taken_as_they_are(tmp_path: Path) -> None:
    load = np.arange(12).reshape(2, 2, 3)

    assert load_trace(written(tmp_path, load=load)).tokens.tolist() == load.tolist()
    with pytest.raises(ConfigError, match="counted already"):
        load_trace(written(tmp_path, load=load), window_tokens=5)


def test_file_that_is_no_trace_is_refused_with_its_name(tmp_path: Path) -> None:
    whole = written(tmp_path, expert_ids=np.zeros((1, 100, 2), dtype=np.int64)).read_bytes()
    np.save(tmp_path / "alone.npy", np.ones(3))
    for length in (0, 10, 200):
        (tmp_path / f"{length}.npz").write_bytes(whole[:length])

    for name in ("missing.npz", "alone.npy", "0.npz", "10.npz", "200.npz"):
        with pytest.raises(HistoryError, match=name):
            load_trace(tmp_path / name)


@pytest.mark.parametrize("is_damaged", [True, False])
def test_trace_with_a_long_name_inside_is_refused_in_one_sentence(
    tmp_path: Path, is_damaged: bool
) -> None:
    trace = tmp_path / "long.npz"
    with zipfile.ZipFile(trace, "w") as archive:
        archive.writestr("x" * 30_000 + ".npy", b"")  # no array
    if is_damaged:  # the header's name, not the index's; a single x may be part of the date
        trace.write_bytes(trace.read_bytes().replace(b"xx", b"yx", 1))

    with pytest.raises(HistoryError) as refused:
        read_arrays(trace, ["x" * 30_000])

    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"frequency": np.ones(3)}, "holds frequency, expected load"),
        ({"expert_ids": np.zeros((3, 4))}, r"shape \(3, 4\) and dtype float64"),
        ({"expert_ids": np.full((1, 8, 1), -2)}, r"experts -2..-2, expected 0"),
        ({"load": np.zeros(4)}, r"shape \(4,\), expected \[layers, experts\]"),
        ({"expert_ids": IDS, "request_len": np.array([9])}, "request_len sums to 9 tokens"),
    ],
)
def test_malformed_trace_is_refused_with_a_reason(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(HistoryError, match=message):
        load_trace(written(tmp_path, **arrays))


@pytest.mark.parametrize("name", ["gamma", "lognormal", "zipf"])
def test_seed_repeats_its_workload(name: str) -> None:
    workload = f"generated:{name}:layers=2,experts=16,windows=3,tokens=256"

    first, again, other = (generate(workload, seed).tokens for seed in (1, 1, 2))

    assert first.shape == (3, 2, 16)
    assert (first == again).all()
    assert (first != other).any()
    assert (first.sum(axis=2) == 256 * 6).all()


def test_drift_makes_later_windows_differ_more() -> None:
    still = "generated:gamma:layers=4,windows=24,drift=0.0,dispersion=1.0"
    moving = "generated:gamma:layers=4,windows=24,drift=0.5,dispersion=1.0"

    def change(workload: str) -> float:
        load = generate(workload, seed=0).tokens.astype(float)
        return float(np.abs(load[-4:].mean(axis=0) - load[:4].mean(axis=0)).sum())

    assert change(moving) > 2 * change(still)


def test_workload_settings_are_read_from_the_name() -> None:
    windows = windows_named("generated:zipf:layers=3,windows=7", 0)

    assert (windows.num_layers, windows.num_experts, windows.num_windows) == (3, 64, 7)
    with pytest.raises(ConfigError, match="unknown workload 'nope', expected one of: gamma"):
        windows_named("generated:nope", 0)
    with pytest.raises(ConfigError, match="unknown workload setting 'layer'"):
        windows_named("generated:zipf:layer=3", 0)
    with pytest.raises(ConfigError, match="layers is 'x', expected a number"):
        windows_named("generated:zipf:layers=x", 0)


def test_every_policy_beats_contiguous_on_steady_skew() -> None:
    history = generate("generated:gamma:layers=4,windows=8,drift=0.0", seed=3)
    scenario = Scenario(Topology.uniform(2, 4, 10), load=history)

    contiguous, greedy, auto = replay_all(scenario, ["contiguous", "greedy", "auto"])

    assert greedy.per_window.mean() < contiguous.per_window.mean() - 0.2
    assert auto.per_window.mean() < contiguous.per_window.mean() - 0.2


def test_gate_that_nothing_passes_moves_nothing() -> None:
    history = generate("generated:zipf:layers=2,windows=5", seed=0)
    scenario = Scenario(Topology.uniform(1, 4, 20), load=history, cost=CostModel(pay_back_s=0.0))

    found = replay(scenario, "auto")

    assert (found.moves, found.num_kept) == (0, 4)


def test_sudden_switch_is_no_noise() -> None:
    steady = np.array([[[1.2, 0.8]]] * 4 + [[[0.6, 1.4]]] * 4)

    assert fluctuation(steady).tolist() == [0.0]
    assert fluctuation(steady[::2] + np.array([0.1, 0, 0.1, 0])[:, None, None])[0] > 0.03


def test_policy_named_twice_is_refused() -> None:
    history = generate("generated:zipf:layers=1,windows=2", seed=0)

    with pytest.raises(ConfigError, match="expected distinct names"):
        replay_all(Scenario(Topology.uniform(1, 4, 20), load=history), ["auto", "auto"])


def test_summary_and_the_page_hold_every_policy(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    history = generate("generated:gamma:layers=2,experts=16,windows=4", seed=0)
    scenario = Scenario(Topology.uniform(1, 4, 5), load=history)
    replays = replay_all(scenario, ["contiguous", "auto"])
    result = summary("<gamma>", scenario, replays)
    command = "eplb simulate '<gamma>'"
    page = comparison_page(result, scenario, replays, conclusions(result), command)
    page.write(tmp_path / "out.html")

    read = json.loads(json.dumps(result))
    page = (tmp_path / "out.html").read_text()
    assert list(read["policies"]) == ["contiguous", "auto"]
    assert len(read["policies"]["auto"]["imbalance_series"]) == 3
    assert "&lt;gamma&gt;" in page
    assert "<li>auto against contiguous: imbalance" in page
    assert "<gamma>" not in page
    assert "<dt>command</dt><dd>eplb simulate &#x27;&lt;gamma&gt;&#x27;</dd>" in page
    assert '<script src="http' not in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html"]


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.npz",), "none.npz does not exist"),
        (("generated:nope",), "unknown workload 'nope'"),
        (("generated:gamma", "--policy", "best"), "unknown policy 'best'"),
        (("generated:gamma", "--slots", "60"), "found 60 slots in a layer on ranks"),
        (("generated:gamma", "--ranks", "2", "--nodes", "4"), "2 ranks on 4 nodes"),
        (("generated:gamma:layers=3", "--model", "mixtral-8x7b"), "the model 32 x 8"),
        (("generated:gamma", "--window-tokens", "7"), "are for trace files"),
        (("generated:gamma:layers=1", "--output", "/nowhere/x.json"), "cannot be written"),
        (("generated:gamma:layers=1", "--output", "x.csv"), "x.csv: JSON is written"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], message: str
) -> None:
    ran = simulate(*arguments)

    assert ran.exit_code == 2
    assert message in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "shape"),
    [("dsv2lite_intent", (16, 26, 64)), ("gptoss20b_decode", (166, 24, 32))],
)
def test_recorded_traces_are_read_completely(name: str, shape: tuple[int, int, int]) -> None:
    trace = DATA / f"{name}.npz"
    if not trace.exists():
        pytest.skip(f"real traces are not at {DATA}: set EPLB_DATA")
    history = load_trace(trace, window_tokens=512)
    assert history.tokens.shape == shape

    scenario = Scenario(Topology.uniform(1, 8, shape[2] // 8 + 1), load=history.latest(6))
    contiguous, auto = replay_all(scenario, ["contiguous", "auto"])
    assert auto.per_window.mean() < contiguous.per_window.mean()


def test_replay_placements_judge_each_window_as_reported() -> None:
    history = generate("generated:gamma:layers=2,experts=16,windows=12,drift=0.6", seed=1)
    topology = Topology.uniform(num_nodes=1, ranks_per_node=4, slots_per_rank=5)

    found = replay(Scenario(topology, load=history, keep_placements=True), "greedy")

    assert len(found.rebalances) > 1
    assert len(found.placements) == history.num_windows - 1
    for window, placement in enumerate(found.placements, start=1):
        expected = imbalance(history.tokens[window], placement, topology)
        assert found.imbalance[window - 1] == pytest.approx(expected)
