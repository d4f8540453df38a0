"""Shadow mode: both sides on the same windows, and what so many of them allow to say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.over_time.replay import Deployment
from eplb.core.cost import CostModel
from eplb.core.dispatch import DispatchRule
from eplb.core.load import LoadHistory, LoadSample
from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError, StoreError
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from simulations.differences import FEWEST, difference_of
from simulations.schemes import Course, PlanTerms
from simulations.shadow.comparison import Account, Comparison, Group, received_by_rank
from simulations.shadow.report import Prices, report, text_below
from simulations.shadow.sources import (
    ObservedWindow,
    Skips,
    SourceOptions,
    StoreSource,
    WindowSource,
    open_source,
)
from simulations.workloads import generate
from telemetry.formats.types import ReadOptions, rows_in_order
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.formats import seeds
from tests.support.formats.seeds import per_pass, torch_file
from tests.support.stores import sqlite_store

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)


def test_experts_that_change_their_slot_within_a_rank_are_not_received() -> None:
    old = Placement(np.array([[0, 1, 0, 2, 3, 2]], dtype=np.int32), 4)
    new = Placement(np.array([[1, 0, 3, 2, 3, 2]], dtype=np.int32), 4)

    assert received_by_rank(old, new, TWO_RANKS).tolist() == [1, 0]


def held(*rows: list[int], generation: int = 0) -> Placement:
    return Placement(np.array(rows, dtype=np.int32), 4, generation)


def observed(*loads: list[int], map_: Placement | None = None) -> list[ObservedWindow]:
    """A window of one layer for each load."""
    layers = rows_in_order(1)
    return [
        ObservedWindow(np.array([load]), layers, map_, f"window {index}")
        for index, load in enumerate(loads)
    ]


def test_moves_are_booked_in_the_first_window_that_they_serve() -> None:
    cost = CostModel(seconds_per_rebalance=0.5, seconds_per_expert=2.0)
    model = ModelShape((0,), 4, 1, 0, 0, expert_bytes=100)
    first, second = held([0, 1, 0, 2, 3, 2]), held([3, 1, 0, 2, 3, 2])
    account = Account(PlanTerms(TWO_RANKS, model, cost=cost), first)

    for placement in (first, second, second):
        account.judge(np.array([[40, 10, 20, 30]]), placement)

    # Equal shares: 40 + 10 against 20 + 30; then 40 + 10 + 15 against 20 + 15.
    assert account.imbalance.tolist() == [1.0, 1.3, 1.3]
    assert account.received.tolist() == [0, 1, 0]
    assert account.seconds.tolist() == [0, 2.5, 0]


def test_window_is_judged_under_what_was_planned_before_it() -> None:
    windows = observed(*[[900, 50, 25, 25]] * 3, [25, 25, 50, 900])
    comparison = Comparison(Group(PlanTerms(TWO_RANKS), 2), Skips())
    for window in windows[:-1]:
        comparison.add(window)
    assert comparison.engine is not None
    served = [comparison.engine.serving, comparison.ours[0].course.serving]

    comparison.add(windows[-1])

    judged = [comparison.engine.account.serving, comparison.ours[0].account.serving]
    assert [one is two for one, two in zip(served, judged, strict=True)] == [True, True]
    assert comparison.engine.serving is not served[0]  # planned on that window, for the next one


@pytest.mark.slow
def test_course_decides_as_the_controller_does() -> None:
    load = generate("generated:gamma:layers=2,experts=8,windows=24", seed=3).tokens
    load = np.concatenate([load, load[:, :, ::-1]])
    topology = Topology.uniform(num_nodes=1, ranks_per_node=4, slots_per_rank=3)
    deployment = Deployment(topology, load[0], top_k=2)
    model = ModelShape((0, 1), 8, 2, 2048, 1408)
    course = Course(PlanTerms(topology, model), "auto", deployment.placement)
    num_changes = 0

    for window, tokens in enumerate(load):
        num_changes += deployment.serve(tokens) is not None
        course.plan_after(window, LoadHistory(load[: window + 1]))

        assert np.array_equal(course.serving.slot_to_expert, deployment.placement.slot_to_expert), (
            window
        )
        assert np.allclose(course.serving.slot_share, deployment.placement.slot_share), window
    assert num_changes > 1


@pytest.mark.parametrize(
    ("load", "row", "kind"),
    [
        ([0, 0, 0, 0], [0, 1, 2, 3, 0, 1], "no tokens"),
        ([4, 3, 2, 1], [0, 1, 2, 3], "a map of another width"),
        ([4, 3, 2, 1], [0, 0, 1, 2, 3, 2], "a map that the rule cannot serve"),
        ([4, 3, 2, 1], None, "a window without a map"),
        ([4, 3, 2, 1, 1], None, "another model"),
    ],
)
def test_window_that_does_not_fit_is_skipped_with_its_kind(
    load: list[int], row: list[int] | None, kind: str
) -> None:
    (good,) = observed([4, 3, 2, 1], map_=held([0, 1, 2, 3, 0, 1]))
    (bad,) = observed(load, map_=None if row is None else held(row))
    comparison = Comparison(Group(PlanTerms(TWO_RANKS, dispatch=DispatchRule.ASCEND_MOD)), Skips())

    assert comparison.add(good)
    assert not comparison.add(bad)
    assert comparison.skips.counts()[kind]["count"] == 1


def test_report_names_what_stands_in_for_missing_maps() -> None:
    comparison = Comparison(Group(PlanTerms(TWO_RANKS), 2), Skips())
    for window in observed([4, 3, 2, 1], [4, 3, 2, 1]):
        comparison.add(window)

    sentences = report(comparison, Prices(), [])["sentences"]

    assert "engine: its algorithm replayed (DeepSeek's EPLB)" in sentences
    assert "the source has no maps: the engine begins with experts in order" in sentences


def test_report_ends_with_the_verdict_on_balancing_at_all() -> None:
    comparison = Comparison(Group(PlanTerms(TWO_RANKS), 2), Skips())
    for window in observed(*[[90_000, 5_000, 2_500, 2_500]] * 12):
        comparison.add(window)

    found = report(comparison, Prices(), ["a note"])

    # Three quarters of a rank's load are one expert: two slots on each rank leave 1.8 without it.
    assert found["verdict"]["worth"] == "replica"
    assert found["verdict"]["moves"] == pytest.approx(1.85, abs=0.06)
    assert found["sentences"][-1] == f"verdict: {found['verdict']['sentence']}"
    assert list(text_below(found))[-2:] == ["note: a note", found["sentences"][-1]]


def test_all_idle_windows_give_a_report_without_figures() -> None:
    comparison = Comparison(Group(PlanTerms(TWO_RANKS), 2), Skips())

    assert not comparison.add(observed([0, 0, 0, 0])[0])

    found = report(comparison, Prices(), [])
    assert found["sentences"] == ["no window could be used: nothing was compared"]
    assert found["windows"]["skipped"]["no tokens"]["count"] == 1


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"num_redundant": 1}, "4 experts and 1 redundant ones on 2 ranks"),
        ({"num_redundant": 4}, "the map has 6 slots, expected 8"),
        ({"terms": PlanTerms(TWO_RANKS, ModelShape((0,), 5, 1, 0, 0))}, "the model 1 x 5"),
    ],
)
def test_first_window_that_contradicts_what_was_stated_is_refused(
    changed: dict[str, Any], why: str
) -> None:
    (window,) = observed([4, 3, 2, 1], map_=held([0, 1, 0, 2, 3, 2]))
    group = Group(**{"terms": PlanTerms(TWO_RANKS)} | changed)

    with pytest.raises(ConfigError, match=why):
        Comparison(group, Skips()).add(window)


def test_fewer_slots_free_memory_of_a_rank() -> None:
    model = ModelShape((0,), 4, 1, 0, 0, expert_bytes=100)
    comparison = Comparison(Group(PlanTerms(TWO_RANKS, model), 2, also_redundant=(0,)), Skips())
    for window in observed(*[[4, 3, 2, 1]] * 2):
        comparison.add(window)

    found = report(comparison, Prices(kv_token_bytes=30), [])["ours"][1]

    assert found["kv_bytes_freed_per_rank"] == 100
    assert found["kv_tokens_freed_per_rank"] == 3


def test_difference_tells_only_what_so_many_windows_allow() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0.0, 0.1, 64)

    def verdict(series: Any) -> str:
        return difference_of(series, 0, least=1e-4).verdict

    few = difference_of(np.full(FEWEST - 1, 0.1), 0, least=1e-4)
    assert (few.verdict, few.interval) == ("too few windows", None)
    assert verdict(0.1 + noise) == "better"
    assert verdict(noise - 0.1) == "worse"
    assert verdict(noise - noise.mean()) == "cannot tell"
    assert verdict(np.zeros(64)) == "no difference"


def test_interval_of_independent_windows_is_that_of_student() -> None:
    series = np.random.default_rng(5).normal(0.0, 1.0, 400)

    found = difference_of(series, 0, least=0).interval

    assert found == difference_of(series, 0, least=0).interval
    assert found != difference_of(series, 1, least=0).interval
    assert found is not None
    half = 1.97 * series.std(ddof=1) / 20
    assert (found[1] - found[0]) / 2 == pytest.approx(half, rel=0.2)


def test_interval_is_wider_where_windows_resemble_their_neighbours() -> None:
    series = np.repeat(np.random.default_rng(1).normal(0.0, 0.1, 64), 4)
    shuffled = np.random.default_rng(2).permutation(series)

    together, alone = (difference_of(one, 0, least=0).interval for one in (series, shuffled))

    assert together is not None
    assert alone is not None
    assert together[1] - together[0] > 1.5 * (alone[1] - alone[0])  # 2 with enough windows


MAP, PHYSICAL = seeds.MAP.tolist(), seeds.PHYSICAL.tolist()
LOGICAL = [[5, 1, 0, 2], [4, 3, 1, 0]]  # of PHYSICAL under MAP
OPTIONS = SourceOptions(ReadOptions(max_windows=1), window_steps=1)


def stat_dumps(folder: Path, count: int, *, experts: int = 8) -> None:
    shape = f"generated:gamma:layers=2,experts={experts},top_k=2,windows={count + 1}"
    for index, tokens in enumerate(generate(shape, seed=1).tokens[:count]):
        name = f"expert_distribution_recorder_{1763828000 + 60 * index}.5.pt"
        dump = {"rank": 0, "logical_count": tokens[None].astype(np.int32)}
        (folder / name).write_bytes(torch_file(dump))


def line(step: int, held: list[list[int]] = MAP, load: list[list[int]] = PHYSICAL) -> str:
    record = {"record_type": "eplb_load_stats", "version": 1, "step": step, "num_ranks": 2}
    return json.dumps(record | {"expert_load": load, "p2l_map": held}) + "\n"


def given(source: WindowSource, *, is_last: bool = True) -> list[ObservedWindow]:
    return list(source.poll(is_last=is_last))


def compared(source: WindowSource) -> dict[str, Any]:
    comparison = Comparison(Group(PlanTerms(TWO_RANKS), 2), source.skips)
    for window in source.poll(is_last=True):
        comparison.add(window)
    return report(comparison, Prices(60.0, 1000), source.notes)


def test_lines_are_counted_under_their_own_map(tmp_path: Path) -> None:
    swapped = [row[::-1] for row in MAP]
    path = tmp_path / "load.jsonl"
    path.write_text(line(0) + line(1, swapped, [row[::-1] for row in PHYSICAL]))

    found = given(open_source([str(path)], OPTIONS))

    assert [one.tokens.tolist() for one in found] == [LOGICAL, LOGICAL]
    assert [one.held.slot_to_expert.tolist() for one in found if one.held] == [MAP, swapped]


def test_half_written_line_waits_and_is_counted_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    whole = line(1)
    path.write_text(line(0) + whole[:40])
    source = open_source([str(tmp_path)], OPTIONS)

    assert len(given(source, is_last=False)) == 1
    assert not source.skips.counts()
    path.write_text(line(0) + whole)
    assert len(given(source, is_last=False)) == 1
    with path.open("a") as file:
        file.write(whole[:40])
    assert given(source) == []
    assert source.skips.counts()["line not readable"]["count"] == 1


def test_map_with_empty_slots_serves_and_one_without_an_expert_is_skipped(tmp_path: Path) -> None:
    empty, load = [[0, 1, 2, 3, -1, 1]], [[5, 1, 0, 2, 0, 0]]
    lacking = [[0, 1, 2, -1, -1, 1]]
    path = tmp_path / "load.jsonl"
    path.write_text(line(0, empty, load) + line(1, lacking, [[5, 1, 0, 0, 0, 0]]))
    source = open_source([str(path)], OPTIONS)

    found = given(source)

    assert [one.tokens.tolist() for one in found] == [[[5, 1, 0, 2]]]
    assert source.skips.counts()["a map that lacks experts"]["count"] == 1


def test_lines_that_were_cut_off_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text(line(0) + line(1))
    source = open_source([str(path)], OPTIONS)
    assert len(given(source, is_last=False)) == 2

    path.write_text(line(2))

    assert given(source) == []
    assert source.skips.counts()["cut off after it was read"]["count"] == 1


def test_truncated_dump_is_skipped_in_a_sentence(tmp_path: Path) -> None:
    stat_dumps(tmp_path, 2)
    whole = sorted(tmp_path.iterdir())[-1]
    whole.write_bytes(whole.read_bytes()[:300])
    source = open_source([str(tmp_path)], OPTIONS)

    assert len(given(source)) == 1
    skipped = source.skips.counts()["not readable"]
    assert skipped["count"] == 1
    assert whole.name in skipped["first"]
    assert "\n" not in skipped["first"]


def test_file_that_still_grows_is_not_read_while_watching(tmp_path: Path) -> None:
    stat_dumps(tmp_path, 1)
    path = next(tmp_path.iterdir())
    whole = path.read_bytes()
    path.write_bytes(whole[:300])
    source = open_source([str(tmp_path)], OPTIONS)

    assert given(source, is_last=False) == []
    path.write_bytes(whole)
    assert given(source, is_last=False) == []
    assert len(given(source, is_last=False)) == 1
    assert given(source) == []
    assert not source.skips.counts()


def test_file_written_again_is_not_counted_twice(tmp_path: Path) -> None:
    stat_dumps(tmp_path, 1)
    (path,) = tmp_path.iterdir()
    source = open_source([str(tmp_path)], OPTIONS)
    assert [len(given(source, is_last=False)) for _ in range(2)] == [0, 1]

    path.write_bytes(path.read_bytes() + b"\0")

    assert given(source) == []
    assert source.skips.counts()["changed after it was read"]["count"] == 1


def test_files_of_ranks_are_summed_by_dump(tmp_path: Path) -> None:
    for dump in range(2):
        for rank in range(3):
            name = f"expert_distribution_recorder_{100 + dump}.{rank}_{rank}.pt"
            (tmp_path / name).write_bytes(torch_file(per_pass(rank)))
    (tmp_path / "expert_distribution_recorder_103.0_0.pt").write_bytes(torch_file(per_pass(0)))
    source = open_source([str(tmp_path)], OPTIONS)

    found = given(source)

    assert len(found) == 2
    assert found[0].held is not None
    assert source.skips.counts()["ranks missing"]["count"] == 1


STAGES = [[5, 1, 0, 2], [3, 3, 1, 1]]  # tokens of hidden layers 1 and 2


def stage_dump(folder: Path, time: float, layer: int, times: int) -> None:
    counts = np.zeros((1, 3, 4), dtype=np.int32)
    counts[0, layer] = np.array(STAGES[layer - 1]) * times
    name = f"expert_distribution_recorder_{time}.pt"
    (folder / name).write_bytes(torch_file({"rank": 0, "logical_count": counts}))


def test_dumps_of_stages_are_joined_as_those_of_a_folder_are(tmp_path: Path) -> None:
    for number in (1, 2):
        for layer in (1, 2):
            stage_dump(tmp_path, number + layer / 10, layer, number)
    found = given(open_source([str(tmp_path)], OPTIONS))

    assert [window.tokens.tolist() for window in found] == [
        (n * np.array(STAGES)).tolist() for n in (1, 2)
    ]
    assert found[0].layers.ids == (1, 2)


def test_dump_of_one_stage_waits_for_that_of_the_other_while_watching(tmp_path: Path) -> None:
    stage_dump(tmp_path, 1.1, 1, 1)
    source = open_source([str(tmp_path)], OPTIONS)
    assert [given(source, is_last=False) for _ in range(2)] == [[], []]

    stage_dump(tmp_path, 1.2, 2, 1)
    found = [window for _ in range(2) for window in given(source, is_last=False)]

    assert [window.tokens.tolist() for window in found] == [STAGES]
    assert given(source) == []
    assert not source.skips.counts()


def test_requests_of_a_folder_are_one_recording(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).random((12, 2, 8)).argsort(axis=2)[:, :, :2].astype(np.int16)
    for number, part in enumerate(np.split(ids, [5, 7])):
        np.save(tmp_path / f"request{number}.npy", part)
    options = SourceOptions(ReadOptions(num_experts=8, window_tokens=4), window_steps=1)
    found = given(open_source([str(tmp_path)], options))

    counted = [
        [
            np.bincount(ids[begin : begin + 4, layer].ravel(), minlength=8).tolist()
            for layer in (0, 1)
        ]
        for begin in (0, 4, 8)
    ]
    assert [window.tokens.tolist() for window in found] == counted


def test_tables_of_ranks_are_summed_as_those_of_a_folder_are(tmp_path: Path) -> None:
    for rank in (0, 1):
        for step in (8, 9):
            text = f"layer,0,1\n3,{step},{rank}\n"
            (tmp_path / f"step{step}_rank{rank}.csv").write_text(text)
    found = given(open_source([str(tmp_path)], OPTIONS))

    assert [window.tokens.tolist() for window in found] == [[[16, 1]], [[18, 1]]]


def test_watching_a_folder_gives_the_report_of_reading_it(tmp_path: Path) -> None:
    stat_dumps(tmp_path, 4, experts=4)
    whole = {path.name: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    at_once = compared(open_source([str(tmp_path)], OPTIONS))
    watched = tmp_path / "watched"
    watched.mkdir()
    source = open_source([str(watched)], OPTIONS)
    comparison = Comparison(Group(PlanTerms(TWO_RANKS), 2), source.skips)
    for name, data in whole.items():
        (watched / name).write_bytes(data)
        for window in (*source.poll(is_last=False), *source.poll(is_last=False)):
            comparison.add(window)
    for window in source.poll(is_last=True):
        comparison.add(window)

    assert report(comparison, Prices(60.0, 1000), source.notes) == at_once
    assert at_once["windows"]["judged"] == 3
    assert at_once["engine"]["plans"] == "deepseek"


def test_store_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store"):
        open_source([str(tmp_path / "none.sqlite")], OPTIONS)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="expected it alone"):
        open_source(["a.sqlite", "b.pt"], OPTIONS)


SPARE = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=4)
STORED = np.array([[0, 1, 0, EMPTY, 2, 3, EMPTY, 2]], dtype=np.int32)  # a spare slot on each rank


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    """A run of one layer, with a spare slot on each of two ranks, in windows of ten steps."""
    found = sqlite_store(tmp_path / "demo.sqlite", "demo")
    model = ModelShape((3,), 4, 1, 8, 8, expert_bytes=100)
    found.begin_run(RunInfo("run", 0.0, model_to_dict(model), topology_to_dict(SPARE), 10))
    return found


def samples(store: StateStore, window: int, ranks: tuple[int, ...] = (0, 1)) -> None:
    counted = np.array([[40, 10, 0, 0, 20, 30, 0, 0]])
    for rank in ranks:
        here = SPARE.slots_on(rank)
        span = (10 * window, 10 * window + 9)
        kind = ("decode", 1, STORED[:, here], counted[:, here])
        store.append([LoadSample("demo", "run", rank, window, float(window), *span, *kind)])


def test_store_gives_complete_windows_with_maps_without_spares(
    tmp_path: Path, store: StateStore
) -> None:
    store.commit(Placement(STORED, 4, 1), expected=None, reason="start")
    for window in (0, 1, 4):
        samples(store, window)
    samples(store, 2, ranks=(0,))
    source = StoreSource(str(tmp_path / "demo.sqlite"), ReadOptions())
    system = source.system()

    found = given(source)
    source.close()

    assert system is not None
    assert (system.topology.slots_of_rank.tolist(), system.model.expert_bytes) == ([3, 3], 100)
    assert [one.where for one in found] == ["window 0", "window 1", "window 4"]
    assert found[0].tokens.tolist() == [[40, 10, 20, 30]]
    assert found[0].held is not None
    assert found[0].held.slot_to_expert.tolist() == [[0, 1, 0, 2, 3, 2]]
    counts = {kind: one["first"] for kind, one in source.skips.counts().items()}
    assert counts == {
        "an incomplete window": "window 2: no samples of every step from ranks 1",
        "missing windows": "window 3: no samples at all of windows 3..3",
    }


def test_store_without_maps_is_told_and_the_engine_is_replayed(
    tmp_path: Path, store: StateStore
) -> None:
    for window in range(3):
        samples(store, window)
    source = StoreSource(str(tmp_path / "demo.sqlite"), ReadOptions())
    system = source.system()
    assert system is not None
    comparison = Comparison(Group(PlanTerms(system.topology, system.model)), source.skips)
    for window_found in source.poll(is_last=True):
        comparison.add(window_found)
    source.close()

    found = report(comparison, Prices(), source.notes)

    assert found["engine"]["plans"] == "deepseek"
    assert found["notes"] == ["generation 1 has no map in the store"]
    assert "the source has no maps: the engine begins with experts in order" in found["sentences"]


def test_window_still_open_is_waited_for_and_given_once(tmp_path: Path, store: StateStore) -> None:
    samples(store, 0, ranks=(0,))
    source = StoreSource(str(tmp_path / "demo.sqlite"), ReadOptions())

    assert given(source, is_last=False) == []
    samples(store, 0, ranks=(1,))
    assert [one.where for one in given(source, is_last=False)] == ["window 0"]
    assert given(source) == []
    source.close()
