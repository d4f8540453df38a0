"""The figures of a demo, worked out by hand."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from api.demo.checking import CheckedStep, Checks
from api.demo.engine import EngineFile
from api.demo.summary import final_windows, render_summary, summarise
from api.demo.text import Load
from api.deploy.deployment import Deployment
from api.monitor.state import Reading, RebalanceMark, WindowScore
from tests.support.deployments import deployment_in
from tests.support.readings import changed, read
from tests.support.stores import MemoryStore

RECORD_BYTES = 3 * 4 * 4 * 4  # three matrices of 4 x 4 in float32


def score(index: int, measured: float, *, is_complete: bool = True) -> WindowScore:
    """A window of four steps that would have been at 2.0 plus a tenth of its index."""
    first = 4 * index
    return WindowScore(index, first, first + 3, measured, 2.0 + index / 10, 1, is_complete, False)


def mark(generation: int, step: int | None) -> RebalanceMark:
    return RebalanceMark(generation, generation, step, 0.0, "a test")


def reading(series: list[WindowScore], marks: list[RebalanceMark]) -> Reading:
    return changed(read(MemoryStore("demo")), series=tuple(series), marks=tuple(marks))


def plan(tmp_path: Any) -> tuple[Deployment, EngineFile, str]:
    """A deployment of two ranks, what its engine serves, and the name of a run."""
    sizes = {"layers": 2, "experts": 3, "top_k": 1, "hidden": 4, "intermediate": 4}
    deployment = deployment_in(
        tmp_path,
        **{f"model__{name}": size for name, size in sizes.items()},
        topology__slots_per_rank=2,
        planner__policy="greedy",
        telemetry__window_steps=4,
        telemetry__sample_steps=1,
    )
    load = Load(tokens_per_rank=50, seed=7, period_s=1.0, text=None, trace=None)
    checks = Checks("", b"", tmp_path, 8, deployment.model, tmp_path, "float32", num_threads=1)
    return deployment, EngineFile(load, checks, "auto", tmp_path), "a"


def report(*step_ms: float, **figures: Any) -> dict[str, Any]:
    """What a rank tells at its end."""
    told: dict[str, Any] = {
        "dispatcher": "all_to_all",
        "steps": 8,
        "step_ms": list(step_ms),
        "swap_pauses_ms": [],
        "samples": 4,
        "checks_dropped": 0,
        "experts_moved": 0,
        "bytes_by_source": {},
    }
    return told | figures


def check(max_error: float, *, wrong_routes: int = 0, phase: str = "idle") -> CheckedStep:
    return CheckedStep(0, 3, phase, max_error, wrong_routes)


def test_final_windows_are_the_last_five_after_the_last_commit() -> None:
    series = [score(index, 1.5) for index in range(9)]

    after_window_two = final_windows(reading(series, [mark(1, 2), mark(2, 12)]))
    assert [window.index for window in after_window_two] == [4, 5, 6, 7, 8]

    after_window_six = final_windows(reading(series, [mark(1, 28)]))
    assert [window.index for window in after_window_six] == [7, 8]


def test_window_that_a_commit_falls_into_is_not_final() -> None:
    series = [score(index, 1.5) for index in range(4)]

    assert [w.index for w in final_windows(reading(series, [mark(1, 9)]))] == [3]


def test_window_that_a_rank_is_missing_from_is_not_final() -> None:
    series = [score(0, 1.5), score(1, 1.5), score(2, 1.5, is_complete=False)]

    assert [w.index for w in final_windows(reading(series, [mark(1, 2)]))] == [1]


@pytest.mark.parametrize("marks", [[], [mark(1, None)], [mark(1, 100)]])
def test_without_a_window_after_a_commit_the_last_ones_are_final(
    marks: list[RebalanceMark],
) -> None:
    series = [score(index, 1.5) for index in range(7)]

    assert [w.index for w in final_windows(reading(series, marks))] == [2, 3, 4, 5, 6]


def test_imbalances_are_medians_of_the_same_windows(tmp_path: Any) -> None:
    series = [score(0, 9.0), score(1, 1.3), score(2, 1.1), score(3, 1.2)]
    seen = reading(series, [mark(1, 4)])

    summary = summarise(*plan(tmp_path), seen, [report(1.0)], {0: 4}, [])

    assert summary["imbalance_final"] == 1.2  # of 1.3, 1.1 and 1.2
    assert summary["imbalance_initial"] == 2.2  # of 2.1, 2.2 and 2.3
    assert [line["window"] for line in summary["imbalance_series"]] == [0, 1, 2, 3]


def test_imbalance_of_the_run_is_the_mean_of_all_complete_windows(tmp_path: Any) -> None:
    series = [score(0, 2.0), score(1, 1.2), score(2, 9.0, is_complete=False), score(3, 1.0)]

    summary = summarise(*plan(tmp_path), reading(series, [mark(1, 4)]), [report(1.0)], {0: 4}, [])

    assert summary["imbalance_run"] == 1.4  # of 2.0, 1.2 and 1.0
    assert summary["imbalance_run_contiguous"] == 2.1333  # of 2.0, 2.1 and 2.3
    assert "1.100 max/mean rank load in the last windows; 2.200 with" in rendered(summary)
    assert "1.400 mean of all windows; 2.133 without balancing" in rendered(summary)


def test_rebalances_are_the_commits_of_a_plan(tmp_path: Any) -> None:
    summary = summarise(*plan(tmp_path), reading([], [mark(1, 4)]), [report()], {0: 4}, [])

    assert (summary["rebalances"], summary["rebalance_steps"]) == (1, [4])


def test_figures_of_the_ranks_are_put_together(tmp_path: Any) -> None:
    first = report(10.0, 30.0, experts_moved=2, bytes_by_source={"host": 200}, samples=5)
    second = report(20.0, experts_moved=1, bytes_by_source={"host": 50, "peer": 50}, samples=5)
    second |= {"swap_pauses_ms": [1.0, 3.0], "checks_dropped": 2}

    summary = summarise(*plan(tmp_path), reading([], []), [first, second], {0: 5, 1: 4}, [])

    assert summary["experts_moved"] == 3
    assert summary["bytes_by_source"] == {"host": 250, "peer": 50}
    assert (summary["samples_written"], summary["samples_lost"]) == (9, 1)
    assert (summary["step_ms_p50"], summary["swap_pause_ms_p50"]) == (20.0, 2.0)
    assert summary["tokens_per_window"] == 4 * 50 * 2
    assert summary["tokens_per_second"] == 5000.0  # 100 tokens in the 20 ms that a step takes
    assert summary["reference_checks_dropped"] == 2
    assert (summary["policy"], summary["seed"]) == ("greedy", 7)


def test_summary_without_measurements_has_none(tmp_path: Any) -> None:
    summary = summarise(*plan(tmp_path), reading([], []), [report(), report()], {}, [])

    names = ("imbalance_initial", "imbalance_final", "imbalance_run", "imbalance_run_contiguous")
    for name in (*names, "step_ms_p50", "swap_pause_ms_p99"):
        assert summary[name] is None
    assert summary["reference_max_error"] is None
    assert summary["tokens_per_second"] is None


def test_output_is_right_within_tolerance_and_with_the_reference_routes() -> None:
    assert check(1e-4).is_right("float32")
    assert not check(1.1e-4).is_right("float32")
    assert not check(1e-7, wrong_routes=1).is_right("float32")
    assert not check(float("nan")).is_right("float32")


def test_fewer_bits_make_a_larger_error_right() -> None:
    assert not check(2e-2).is_right("float32")
    assert check(2e-2).is_right("bfloat16")
    assert check(3.5e-2).is_right("fp8")
    assert not check(3.5e-2).is_right("bfloat16")


def test_checks_are_counted_by_phase(tmp_path: Any) -> None:
    checks = [check(1e-7), check(1e-2, phase="swap"), check(1e-6, phase="swap")]

    summary = summarise(*plan(tmp_path), reading([], []), [report()], {}, checks)

    assert summary["reference_checks"] == 3
    assert summary["reference_checks_by_phase"] == {"idle": 1, "swap": 2}
    assert (summary["reference_failures"], summary["reference_max_error"]) == (1, 1e-2)


def rendered(summary: dict[str, Any]) -> str:
    text = StringIO()
    Console(file=text, width=100).print(render_summary(summary))
    return text.getvalue()


def test_summary_table_reports_whether_all_outputs_were_right(tmp_path: Any) -> None:
    good = [check(1e-7), check(1e-7)]

    right = summarise(*plan(tmp_path), reading([], []), [report(1.0)], {0: 4}, good)
    wrong = summarise(*plan(tmp_path), reading([], []), [report(1.0)], {0: 4}, [check(1.0)])

    assert "eplb demo: every answer right" in rendered(right)
    assert "2 of 2 checks" in rendered(right)
    assert "something went wrong" in rendered(wrong)
    assert "0 of 1 checks" in rendered(wrong)


def test_table_gives_time_without_tokens_from_the_last_token(tmp_path: Any) -> None:
    summary = summarise(*plan(tmp_path), reading([], []), [report(1.0)], {0: 4}, [])

    assert "without tokens" not in rendered(summary | {"deaths": 0, "unserved_s": 0.0})
    one_death = rendered(summary | {"deaths": 1, "unserved_s": 4.62})
    assert "1 of ranks; 4.6 s without tokens, from the last token to the next" in one_death


def test_title_claims_only_what_was_done(tmp_path: Any) -> None:
    def title(marks: list[RebalanceMark], checks: list[CheckedStep]) -> str:
        seen = reading([], marks)
        return rendered(summarise(*plan(tmp_path), seen, [report(1.0)], {0: 4}, checks))

    assert "eplb demo: rebalanced, and every answer right" in title([mark(1, 4)], [check(1e-7)])
    assert "eplb demo: every answer right" in title([], [check(1e-7)])
    assert "eplb demo: rebalanced ─" in title([mark(1, 4)], [])
    assert "eplb demo: nothing was checked" in title([], [])
