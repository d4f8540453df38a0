"""Shadow mode: windows from what engines write, and figures that do not depend on how they came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.engine_files import seeds
from benchmarks.engine_files.seeds import per_pass, torch_file
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from simulations.course import Terms
from simulations.shadow.accounts import received_by_rank
from simulations.shadow.comparison import Comparison, Group
from simulations.shadow.confidence import FEWEST, gain_of
from simulations.shadow.report import Prices, report
from simulations.shadow.sources import open_source
from simulations.shadow.windows import Observed, Source, SourceOptions
from simulations.workloads import Workload, generate
from telemetry.formats.types import ReadOptions

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
MAP, PHYSICAL = seeds.MAP.tolist(), seeds.PHYSICAL.tolist()
LOGICAL = [[5, 1, 0, 2], [4, 3, 1, 0]]  # of PHYSICAL under MAP
OPTIONS = SourceOptions(ReadOptions(max_windows=1), window_steps=1)


def stat_dumps(folder: Path, count: int, *, experts: int = 8) -> None:
    history = generate(Workload("gamma", layers=2, experts=experts, windows=count), seed=1)
    for index, tokens in enumerate(history.tokens):
        name = f"expert_distribution_recorder_{1763828000 + 60 * index}.5.pt"
        dump = {"rank": 0, "logical_count": tokens[None].astype(np.int32)}
        (folder / name).write_bytes(torch_file(dump))


def line(step: int, held: list[list[int]] = MAP, load: list[list[int]] = PHYSICAL) -> str:
    record = {"record_type": "eplb_load_stats", "version": 1, "step": step, "num_ranks": 2}
    return json.dumps(record | {"expert_load": load, "p2l_map": held}) + "\n"


def given(source: Source, *, is_last: bool = True) -> list[Observed]:
    return list(source.poll(is_last=is_last))


def compared(source: Source) -> dict[str, Any]:
    comparison = Comparison(Group(2, 1, 2, Terms(TWO_RANKS)), source.skips)
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


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (Observed, "no tokens"),
        (Placement, "a map of another width"),
        (Workload, "another model"),
    ],
)
def test_window_that_does_not_fit_is_skipped_with_its_kind(
    tmp_path: Path, bad: type, kind: str
) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text(line(0))
    source = open_source([str(path)], OPTIONS)
    (good,) = given(source)
    tokens, held = good.tokens, good.held
    if bad is Observed:
        tokens = np.zeros_like(tokens)
    elif bad is Workload:
        tokens, held = np.ones((2, 5), dtype=np.int64), None
    else:
        held = Placement(np.array([[0, 1, 2, 3]] * 2, dtype=np.int32), 4)
    group = Group(2, 1, None, Terms(TWO_RANKS), engine_plans="none", policy="greedy")
    comparison = Comparison(group, source.skips)

    assert comparison.add(good)
    assert not comparison.add(Observed(tokens, good.layers, held, "window 1"))
    assert source.skips.counts()[kind]["count"] == 1


def test_watching_a_folder_gives_the_report_of_reading_it(tmp_path: Path) -> None:
    stat_dumps(tmp_path, 4, experts=4)
    whole = {path.name: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    at_once = compared(open_source([str(tmp_path)], OPTIONS))
    watched = tmp_path / "watched"
    watched.mkdir()
    source = open_source([str(watched)], OPTIONS)
    comparison = Comparison(Group(2, 1, 2, Terms(TWO_RANKS)), source.skips)
    for name, data in whole.items():
        (watched / name).write_bytes(data)
        for window in (*source.poll(is_last=False), *source.poll(is_last=False)):
            comparison.add(window)
    for window in source.poll(is_last=True):
        comparison.add(window)

    assert report(comparison, Prices(60.0, 1000), source.notes) == at_once
    assert at_once["windows"]["judged"] == 3
    assert at_once["engine"]["plans"] == "deepseek"


def test_experts_that_change_their_slot_within_a_rank_are_not_received() -> None:
    old = Placement(np.array([[0, 1, 0, 2, 3, 2]], dtype=np.int32), 4)
    new = Placement(np.array([[1, 0, 3, 2, 3, 2]], dtype=np.int32), 4)

    assert received_by_rank(old, new, TWO_RANKS).tolist() == [1, 0]


def test_gain_tells_only_what_so_many_windows_allow() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0.0, 0.1, 64)

    assert gain_of(np.full(FEWEST - 1, 0.1), 0).verdict == "too few windows"
    assert gain_of(0.1 + noise, 0).verdict == "better"
    assert gain_of(noise - 0.1, 0).verdict == "worse"
    assert gain_of(noise - noise.mean(), 0).verdict == "cannot tell"
    assert gain_of(np.zeros(64), 0).verdict == "no difference"


def test_blocks_widen_the_interval_of_windows_that_resemble_each_other() -> None:
    series = np.repeat(np.random.default_rng(1).normal(0.0, 0.1, 16), 4)
    shuffled = np.random.default_rng(2).permutation(series)

    found, alone = gain_of(series, 0), gain_of(shuffled, 0)

    assert found.high - found.low > 1.2 * (alone.high - alone.low)


def test_store_among_other_places_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected it alone"):
        open_source(["a.sqlite", "b.pt"], OPTIONS)
