"""Recommendations and limits: reasons that follow from memory and balance; refused questions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from api.cli.main import app
from eplb import ModelShape, preset
from eplb.core.kernels import kernel_for
from eplb.core.model import KV_TOKEN_BYTES, PRESETS, kv_token_bytes
from eplb.errors import ConfigError
from simulations.inputs import even_topology, model_named
from simulations.recommend import MemoryModel, Question, Speculation, recommend, sure_gain
from simulations.report import conclusions, limit_of
from simulations.step_time import hardware_named
from simulations.windows import RecordedDeployment, WindowSeries

MODEL = ModelShape((0, 1), 16, 4, 7168, 2048)
CARD = hardware_named("h200")
ON_H200 = kernel_for("h200", "bf16", None, is_prefill=False)


def question(hot: int, spare_bytes: float = 1e9, **changes: Any) -> Question:
    """Four ranks of four experts, one expert ``hot`` times as busy, and so much KV cache."""
    window = np.full((2, 16), 1000, dtype=np.int64)
    window[:, 0] *= hot
    windows = WindowSeries(2, 16, lambda: (window.copy() for _ in range(6)))
    weights = 4 * MODEL.num_layers * MODEL.expert_bytes
    memory = MemoryModel(CARD, MODEL, 1.0, CARD.memory_bytes - weights - spare_bytes, 1000.0)
    chosen: dict[str, Any] = {
        "kernel": ON_H200,
        "ranks": (4,),
        "redundant": (0, 1),
        "intervals": (1,),
        "context": 1000,
        "most_sequences": 4096,
    }
    return Question(windows, memory, **(chosen | changes))


def test_drafts_fill_the_batch_of_experts_and_give_more_tokens() -> None:
    plain = recommend(question(hot=1, most_sequences=8))
    drafted = recommend(question(hot=1, most_sequences=8, speculation=Speculation(1, 0.8)))

    last, twice = plain.batches[-1], drafted.batches[-1]
    assert twice.tokens_per_expert == 2 * last.tokens_per_expert
    # A step of two layers lasts half as long again by the draft's own layer, and gives 1.8 tokens.
    step_us = drafted.best.step_us
    assert drafted.best.tokens_per_s == pytest.approx(8 * 1.8 / (step_us / 1e6))
    assert twice.planned_ms == pytest.approx(step_us / 1000 / 1.8)
    assert step_us > 1.5 * plain.best.step_us


def test_redundancy_is_recommended_only_where_an_expert_is_hot() -> None:
    answer = recommend(question(hot=9))

    assert answer.best.redundant == 1
    assert "imbalance 2." in answer.sentences()[1]
    assert "limited by the KV cache" in " ".join(answer.sentences())
    even = recommend(question(hot=1))
    assert (even.best.redundant, even.best.imbalance) == (0, 1.0)
    assert even.sentences()[-1].startswith("runner-up: ")
    # No gain is told below the error of the times.
    assert "cannot tell which is faster" in even.sentences()[-1]


def test_gain_below_the_error_of_times_is_not_told_as_one() -> None:
    answer = recommend(question(hot=9))
    unsure = replace(answer.best, error=9.9)

    told = replace(answer, candidates=(unsure, *answer.candidates[1:])).sentences()

    assert "cannot tell" not in " ".join(answer.sentences()[:2])
    assert "(error of times at these rows: 990.0%)" in told[0]
    assert told[1].startswith("cannot tell whether balancing pays here")
    assert told[2].startswith("replayed, on windows that no plan had seen: imbalance")
    assert told[3].startswith("assumed, by the model of times: a step takes")


def test_gain_of_links_that_nobody_measured_is_told_apart() -> None:
    answer = recommend(question(hot=9))
    best = answer.best
    nothing = next(one for one in answer.candidates if not one.interval)
    links = replace(nothing, step_us=best.step_us + 900.0, sequences=best.sequences)
    links = replace(links, parts_us=(best.parts_us[0] + 900.0, *best.parts_us[1:]))
    slower = best.tokens_per_s * best.step_us / links.step_us
    links = replace(links, tokens_per_s=slower, ranks=best.ranks)
    sure = sure_gain(best, links)

    told = replace(answer, candidates=(replace(best, error=0.02), links)).sentences()

    assert sure == pytest.approx(0.0, abs=1e-9)  # the whole gain is that of links
    assert "+0.0% by experts, and the rest by links that nobody measured" in told[0]
    assert told[1].startswith("cannot tell whether balancing pays here: what experts gain is below")
    assert sure_gain(best, replace(links, sequences=best.sequences + 1)) is None


def test_redundancy_that_takes_the_whole_cache_does_not_fit() -> None:
    one_slot = MODEL.num_layers * MODEL.expert_bytes
    answer = recommend(question(hot=9, spare_bytes=one_slot / 2))

    assert answer.best.redundant == 0
    assert [one.redundant for one in answer.unfit] == [1]
    assert "does not fit: EP4 with 5 slots a rank lacks 0.1 GB" in answer.sentences()[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"redundant": ()}, "no redundant to compare"),
        ({"redundant": (-1,)}, "expected 0 or more, and 1 or more"),
        ({"context": 0}, "context is 0, expected 1 or more"),
        ({"window_s": 0.0}, "window_s is 0.0, expected above 0"),
        ({"attention_ranks": ()}, "no attention_ranks to compare"),
        ({"attention_ranks": (-1,)}, "expected 0 or more"),
        ({"most_ms": 0.0}, "most_ms is 0.0, expected above 0"),
    ],
)
def test_question_that_cannot_be_asked_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        question(hot=1, **changes)


def of_shape(
    layers: int, experts: int, deployment: RecordedDeployment | None = None
) -> WindowSeries:
    return WindowSeries(
        layers, experts, lambda: iter(()), deployment=deployment or RecordedDeployment()
    )


def test_model_is_the_known_one_of_the_load_s_shape() -> None:
    own = ModelShape(tuple(range(48)), 128, 8, 512, 256)

    model, which = model_named(None, of_shape(48, 128))

    assert model is preset("qwen3-30b")
    assert which == "qwen3-30b, the known model of 48 MoE layers x 128 experts"
    assert model_named(None, of_shape(58, 256))[0] is preset("deepseek-v3")  # one of several names
    assert model_named(None, of_shape(48, 128, RecordedDeployment(own)))[0] is own  # the store's
    with pytest.raises(ConfigError, match="10 MoE layers x 20 experts"):
        model_named(None, of_shape(10, 20))


SUMMARY = {
    "policies": {
        "none": {"oracle": False, "failed": "", "imbalance_mean": 1.5, "rebalances": 0},
        "auto": {"oracle": False, "failed": "", "imbalance_mean": 1.08, "rebalances": 3},
        "oracle:re-plan": {"oracle": True, "failed": "", "imbalance_mean": 1.0, "rebalances": 0},
    }
}


@pytest.mark.parametrize(
    ("text", "is_broken"),
    [
        ("imbalance>1.1", False),
        ("imbalance > 1.05", True),
        ("none.imbalance>1.1", True),
        ("oracle:re-plan.imbalance>=1", True),
        ("rebalances<3", False),
        ("rebalances<=3", True),
    ],
)
def test_limit_is_of_the_last_policy_that_is_no_oracle(text: str, is_broken: bool) -> None:
    assert (limit_of(text).broken_by(SUMMARY) is not None) == is_broken
    failed = {"policies": {"auto": {"oracle": False, "failed": "window 3: no place"}}}
    assert limit_of("imbalance>9").broken_by(failed) == "auto failed: window 3: no place"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("imbalance", "expected a form like"),
        ("speed>1", "unknown figure 'speed', expected one of: imbalance"),
        ("imbalance>much", "'much' is no number"),
        ("imbalance>nan", "'nan' is no number"),
        ("vllm.imbalance>1", "no policy 'vllm', expected one of: none, auto"),
        ("tokens_per_s<5", "tokens_per_s is not known, expected --hardware"),
    ],
)
def test_limit_that_cannot_be_judged_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        limit_of(text).broken_by(SUMMARY)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_commands_answer_with_times_and_reasons(tmp_path: Path) -> None:
    load = "generated:v2-lite:windows=5,tokens=20000"
    common = (load, "--model", "deepseek-v2-lite", "--hardware", "h100")
    out = tmp_path / "out.json"

    simulated = command(
        "simulate", *common, "--policy", "none,deepseek", "--fail-if", "imbalance>1.0001"
    )
    asked = command(
        "recommend",
        *common,
        "--ranks",
        "8",
        "--redundant-per-rank",
        "0,1",
        "--every",
        "2",
        "--output",
        str(out),
    )

    assert simulated.exit_code == 1, simulated.stderr
    assert "tokens/s, of which moves took" in simulated.stdout
    assert "deepseek: imbalance is" in simulated.stderr
    assert asked.exit_code == 0, asked.stderr
    assert "recommended: EP8" in asked.stdout
    assert "runner-up: EP8" in asked.stdout
    assert "expert times: trtllm's cutlass in bf16 on h100" in asked.stdout
    rules = [line for line in asked.stdout.splitlines() if "─" in line]  # as wide as their tables
    assert len(rules) == 2
    assert all(len(line) <= 80 for line in rules)
    assert asked.stdout.startswith("assumed, as nothing tells: 8 ranks on a node")
    assert len(json.loads(out.read_text())["candidates"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "generated:v2-lite", "--hardware", "h200"), "expected --model"),
        (("simulate", "generated:v2-lite", "--fail-if", "x"), "expected a form like"),
        (("recommend", "generated:mixed", "--model", "nope"), "unknown model 'nope'"),
        (
            ("recommend", "generated:mixed", "--model", "deepseek-v3", "--hardware", "tpu"),
            "unknown hardware 'tpu', expected one of: b200",
        ),
        (
            ("recommend", "generated:mixed", "--model", "deepseek-v3", "--ranks", "0"),
            "--ranks is '0', expected numbers of 1",
        ),
    ],
)
def test_bad_questions_are_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], message: str
) -> None:
    ran = command(*arguments)

    assert ran.exit_code == 2
    assert message in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1


def test_page_that_cannot_be_written_is_refused_before_the_replay(tmp_path: Path) -> None:
    for name in ("simulate", "recommend"):
        ran = command(name, "generated:mixed", "--html", str(tmp_path / "none" / "page.html"))

        assert ran.exit_code == 2
        assert "page.html cannot be written, expected a file in a folder" in ran.stderr


def test_times_of_a_load_without_steps_are_refused(tmp_path: Path) -> None:
    trace = tmp_path / "load.npz"
    np.savez(trace, load=np.ones((4, 32, 8), dtype=np.int64))

    for words in (("simulate",), ("sweep", "--output", str(tmp_path / "sweep"))):
        timed = ("--model", "mixtral-8x7b", "--hardware", "h100")
        ran = command(*words, str(trace), *timed)

        assert ran.exit_code == 2
        assert "expected --steps" in ran.stderr


def test_load_without_tokens_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "zeros.npz"
    np.savez(trace, load=np.zeros((4, 32, 8), dtype=np.int64))

    ran = command("recommend", str(trace), "--model", "mixtral-8x7b", "--ranks", "4")

    assert ran.exit_code == 2
    assert "all counts of its 4 windows are 0" in ran.stderr


def test_windows_without_tokens_change_no_recommendation(tmp_path: Path) -> None:
    busy = np.random.default_rng(0).integers(1, 1000, (6, 32, 8))
    found = []
    for name, load in (("busy", busy), ("idle", np.concatenate((busy, np.zeros_like(busy[:2]))))):
        np.savez(tmp_path / "load.npz", load=load)
        words = ("--model", "mixtral-8x7b", "--ranks", "4", "--every", "2", "--json")
        ran = command("recommend", str(tmp_path / "load.npz"), *words)
        assert ran.exit_code == 0, f"{name}: {ran.output}"
        found.append(json.loads(ran.stdout))

    assert [one["candidates"][0]["imbalance"] for one in found] == [
        found[0]["candidates"][0]["imbalance"]
    ] * 2
    assert "note: 2 of 8 windows have no tokens and are left out" in found[1]["sentences"]


def test_kv_cache_of_a_token_is_the_models_and_asked_for_where_unknown() -> None:
    v3, lite = preset("deepseek-v3"), preset("deepseek-v2-lite")

    assert (kv_token_bytes(v3), kv_token_bytes(lite)) == (70_272, 31_104)
    assert kv_token_bytes(lite.with_precision("fp8")) == 31_104  # of the experts alone
    assert kv_token_bytes(MODEL) is None
    assert set(PRESETS) - set(KV_TOKEN_BYTES) == {"deepseek-r1", "deepseek-v3.2"}  # as deepseek-v3


def test_engine_adds_its_own_balancer_and_gets_its_own_options() -> None:
    load = "generated:v2-lite:windows=3,layers=26,tokens=20000"
    words = ("--model", "deepseek-v2-lite", "--hardware", "h100", "--ranks", "8", "--every", "1")
    ran = command(
        "recommend", load, *words, "--redundant-per-rank", "1", "--engine", "vllm", "--json"
    )

    found = json.loads(ran.stdout)
    assert {one["policy"] for one in found["candidates"]} == {"none", "vllm", "auto"}
    assert '"num_redundant_experts": 8' in found["engine_options"]["vllm"]
    assert "--ep-num-redundant-experts 8" in found["engine_options"]["sglang"]
    assert not any(line.startswith("sglang:") for line in found["sentences"])
    assert "replay 1 done after" in ran.stderr


def test_plans_for_time_are_labelled_in_table_and_json() -> None:
    words = ("--model", "deepseek-v2-lite", "--ranks", "8", "--policy", "none,auto")
    load = "generated:v2-lite:windows=3,tokens=200"
    timed = command("simulate", load, *words, "--hardware", "h200", "--steps", "2", "--json")
    shown = command("simulate", load, *words, "--hardware", "h200", "--steps", "2")

    policies = json.loads(timed.stdout)["policies"]
    assert [policies[name]["objective"] for name in ("none", "auto")] == ["", "time"]
    assert "auto (time)" in shown.stdout


def test_arrays_of_a_trace_that_nothing_reads_are_named(tmp_path: Path) -> None:
    trace = tmp_path / "load.npz"
    np.savez(trace, load=np.ones((4, 2, 16), dtype=np.int64), lood=np.ones(3))

    ran = command("simulate", str(trace), "--ranks", "4", "--policy", "none", "--json")

    assert "note: load.npz: not read: lood" in json.loads(ran.stdout)["sentences"]


def test_load_of_another_model_is_blamed_by_its_name(tmp_path: Path) -> None:
    trace = tmp_path / "other.npz"
    np.savez(trace, load=np.ones((4, 2, 16), dtype=np.int64))

    ran = command("recommend", str(trace), "--model", "mixtral-8x7b", "--ranks", "4")

    assert ran.exit_code == 2
    assert "other.npz: the file has 16 experts, expected 8 as --experts, --model" in ran.stderr


def test_prefill_answers_with_the_time_to_the_first_token() -> None:
    decode = recommend(question(hot=9, most_sequences=512))
    prefill = recommend(
        question(hot=9, spare_bytes=1e9, is_prefill=True, most_sequences=500, context=2000)
    )

    # A prompt of 2,000 tokens fills four steps of 500.
    assert prefill.best.latency_ms == pytest.approx(4 * prefill.best.step_us / 1000)
    assert any("TTFT of a prompt of 2000 tokens" in one for one in prefill.sentences())
    assert any(one.startswith("TPOT: ") for one in decode.sentences())
    assert min(one.sequences for one in prefill.batches) >= 256
    with pytest.raises(ConfigError, match="drafts in prefill"):
        question(hot=1, is_prefill=True, speculation=Speculation(1, 0.8))


def test_attention_takes_its_stated_share_of_a_step_at_even_load() -> None:
    (last,) = recommend(question(hot=1, attention_share=0.25, redundant=(0,))).batches[-1:]
    (bare,) = recommend(question(hot=1, redundant=(0,))).batches[-1:]

    assert bare.perfect_ms / last.perfect_ms == pytest.approx(0.75, rel=1e-3)


def test_each_candidate_has_its_largest_batch_within_the_limit_of_latency() -> None:
    free = recommend(question(hot=9))
    limit = free.candidates[-1].latency_ms * 0.7

    answer = recommend(question(hot=9, most_ms=limit))

    for one in answer.candidates:
        assert one.latency_ms <= limit
        if one.limited_by != "the KV cache":
            more = question(
                hot=9, redundant=(one.redundant,), policies=(one.policy,),
                most_sequences=one.sequences + 1,
            )  # fmt: skip
            (larger,) = [
                found for found in recommend(more).candidates if found.interval == one.interval
            ]
            assert larger.latency_ms > limit
    assert any("--most-ms" in one.limited_by for one in answer.candidates)
    assert all(batch.planned_ms <= limit for batch in answer.batches)
    rates = [one.tokens_per_s for one in answer.candidates]
    assert rates == sorted(rates, reverse=True)


def test_limit_that_no_batch_keeps_is_told_with_the_nearest_candidate() -> None:
    answer = recommend(question(hot=9, most_ms=1e-3))

    assert answer.best.latency_ms == min(one.latency_ms for one in answer.candidates)
    assert answer.best.sequences == 1
    assert answer.sentences()[0].startswith("no candidate keeps 0.001 ms (--most-ms); the nearest")


def test_policies_are_compared_as_asked_for() -> None:
    answer = recommend(question(hot=9, policies=("auto", "greedy"), redundant=(0,)))

    assert {one.policy for one in answer.candidates} == {"auto", "greedy", "none"}
    redundant = recommend(question(hot=9, redundant=(1,), policies=("greedy",)))
    assert {one.policy for one in redundant.candidates} == {"greedy", "none"}
    assert all(one.policy in one.name for one in answer.candidates if one.interval)


@pytest.mark.parametrize(
    ("ranks", "per_node"), [(4, [4]), (8, [8]), (12, [6, 6]), (16, [8, 8]), (20, [7, 7, 6])]
)
def test_group_that_fills_no_whole_number_of_nodes_is_on_one_more(
    ranks: int, per_node: list[int]
) -> None:
    topology = even_topology(ranks, 8, 1, 64)

    assert np.bincount(topology.node_of_rank).tolist() == per_node


def test_model_of_a_config_is_asked_about_and_the_answer_ends_with_a_verdict(
    tmp_path: Path,
) -> None:
    config, out = tmp_path / "config.json", tmp_path / "out.json"
    figures = {"num_hidden_layers": 3, "num_experts": 8, "hidden_size": 512}
    config.write_text(json.dumps(figures | {"moe_intermediate_size": 256}))
    words = (
        *("recommend", "generated:gamma:windows=12,layers=3,experts=8,tokens=20000"),
        *("--hardware", "h100", "--ranks", "4", "--redundant-per-rank", "0", "--every", "4"),
        *("--output", str(out), "--model"),
    )

    asked = command(*words, str(config))
    without_cache = command(*words, f"{config},top_k=2")
    ran = command("recommend", *words[1:], f"{config},top_k=2", "--kv-token-bytes", "1024")

    assert asked.exit_code == 2
    assert "top_k=NUMBER" in "".join(asked.stderr.split())
    assert without_cache.exit_code == 2
    assert "--kv-token-bytes" in without_cache.stderr
    assert ran.exit_code == 0, ran.stderr
    found = json.loads(out.read_text())
    assert found["verdict"]["worth"] in ("moves", "replica")
    assert found["sentences"][-1] == f"verdict: {found['verdict']['sentence']}"
    assert "verdict: worth enabling" in ran.stdout


def compared(**moved: tuple[float, int]) -> str:
    """The first conclusion on policies by their imbalance and the experts that they moved."""
    policies = {
        name: {"oracle": False, "failed": "", "imbalance_mean": mean}
        | {"experts_moved": experts, "rebalances": 1, "objective": ""}
        for name, (mean, experts) in moved.items()
    }
    result = {"policies": policies, "windows": 40, "steps_per_window": 4}
    return conclusions(result)[0]


def test_winner_that_moves_far_more_for_little_is_named_with_the_other() -> None:
    assert compared(none=(1.6, 0), auto=(1.112, 9_000), flashlb=(1.1, 372_212)) == (
        "best by mean imbalance, oracles aside: flashlb, by 0.012 over auto, which moves 9,000 "
        "experts in place of 372,212; --hardware and --model price moves"
    )
    assert compared(none=(1.6, 0), auto=(1.14, 9_000), flashlb=(1.1, 372_212)).endswith(": flashlb")
    assert compared(none=(1.6, 0), auto=(1.11, 200_000), flashlb=(1.1, 372_212)).endswith("flashlb")
