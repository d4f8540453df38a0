"""The harness that serves vLLM on a GPU: what of it needs neither vLLM nor a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.engines.served import carry, install
from benchmarks.engines.served.judge import judge_runs
from benchmarks.engines.served.load import Load, topic_tokens
from benchmarks.engines.served.model import SIZES
from benchmarks.engines.served.run import Run

TWELVE = Load(12, 4, prompt_tokens=6, answer_tokens=3, rounds_of_topic=1, seed=5)
LIBRARY = np.random.default_rng(1).bytes(20_000)  # more than one part holds
NOISE, FAULT = 1e-6, 1e-2


def wheel_in(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
    return path


@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What ``carry`` lays out for two small wheels, with parts of 4 KiB."""
    monkeypatch.setattr(carry, "LARGE", len(LIBRARY))
    folder = tmp_path / "carried"
    files = {
        "vllm/__init__.py": b"raise RuntimeError('no kernels')\n",
        "vllm/_C.abi3.so": LIBRARY,
        "vllm/vllm-rs": b"left out",
    }
    engine = wheel_in(folder, "vllm", files)
    wheel_in(folder / "more", "loguru", {"loguru/__init__.py": b"x = 1\n"})
    options = ["--engine", str(engine), "--wheels", str(folder / "more"), "--part-mib", "0.004"]
    assert carry.main([str(folder / "out"), *options]) == 0
    return folder / "out"


def test_parts_of_wheels_unpack_to_the_same_bytes(tmp_path: Path, carried: Path) -> None:
    manifest = json.loads((carried / "manifest.json").read_text())
    assert len(manifest["parts"]) > 4

    install.unpack(manifest, carried, tmp_path / "site")

    assert (tmp_path / "site/vllm/_C.abi3.so").read_bytes() == LIBRARY
    assert (tmp_path / "site/loguru/__init__.py").read_bytes() == b"x = 1\n"
    assert not (tmp_path / "site/vllm/vllm-rs").exists()


def test_a_part_with_a_flipped_byte_is_refused(tmp_path: Path, carried: Path) -> None:
    part = carried / "part-0"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    manifest = json.loads((carried / "manifest.json").read_text())

    with pytest.raises(install.Refusal, match=r"part-0 has the digest .* expected one of"):
        install.keep_part(part, manifest["parts"], tmp_path / "kept")

    assert not (tmp_path / "kept").exists()


def test_a_wheel_that_does_not_load_is_named_with_its_message(tmp_path: Path) -> None:
    wheel_folder = tmp_path / "vllm"
    wheel_folder.mkdir()
    (wheel_folder / "__init__.py").write_text("raise RuntimeError('no kernels')\n")

    with pytest.raises(install.Refusal, match=r"does not load \(RuntimeError: no kernels\)"):
        install.try_engine(tmp_path)


def test_a_host_that_does_not_fit_gets_one_sentence_and_no_file(
    tmp_path: Path, carried: Path
) -> None:
    site = tmp_path / "host/site"

    host = subprocess.run(
        [sys.executable, carried / "install.py", site, carried / "part-0"],
        capture_output=True,
        text=True,
    )

    assert host.returncode == install.REFUSED
    assert host.stderr.startswith("install: ")
    assert ", expected " in host.stderr
    assert host.stderr.count("\n") == 1
    assert not site.parent.exists()


def test_each_prompt_is_served_once_in_a_pass_over_the_load() -> None:
    served = [
        number
        for turn in range(TWELVE.num_rounds)
        for rank in range(2)
        for number in TWELVE.numbers_of(turn, rank, 2)
    ]

    assert sorted(served) == list(range(12))


def test_most_tokens_of_a_prompt_are_of_its_topic() -> None:
    load = Load(8, 4, prompt_tokens=400, answer_tokens=3, rounds_of_topic=1, seed=5)
    topics = [load.topic_of(turn) for turn in range(2)]

    for number in (0, 4):
        tokens = topic_tokens(topics[number // 4])
        prompt, _ = load.tokens_of(number)
        assert 0.75 < np.isin(prompt, list(tokens)).mean() < 0.95
    assert topics[0] != topics[1]


def truth(numbers: Any) -> Any:
    return np.sin(np.asarray(numbers)[:, None] + np.arange(TWELVE.answer_tokens))


def write_run(run: Run, out: Path, seed: int, wrong: tuple[int, ...] = ()) -> None:
    """Files of a run whose answers are the truth with noise, and wrong ones."""
    drawn, folder, size = np.random.default_rng(seed), out / run.name, SIZES[run.size]
    folder.mkdir(parents=True)
    (folder / "outcome").write_text("")
    for rank in range(run.ranks):
        turns = range(run.rounds)
        numbers = [
            number for turn in turns for number in run.load.numbers_of(turn, rank, run.ranks)
        ]
        logs = truth(numbers) + drawn.normal(0, NOISE, (len(numbers), TWELVE.answer_tokens))
        logs[np.isin(numbers, wrong)] += FAULT
        times = np.full((len(numbers), 2), (0.05, 0.004))
        np.savez(folder / f"answers.{rank}.npz", numbers=np.array(numbers), logs=logs, times=times)
        steps = np.arange(8)
        maps = np.zeros((8, size.layers, size.experts + run.redundant), np.int16)
        maps[3:, 0, :2] = maps[6:, 1, :2] = 1
        rows = np.ones((8, size.layers, 160), np.int32)
        figures = {"began": steps * 0.01, "ended": steps * 0.01, "plugin": steps * 0.0}
        figures |= {"dummy": steps * 0, "rebalance": steps // 3}
        np.savez(folder / f"steps.{rank}.npz", rows=rows, maps=maps, peak_bytes=0, **figures)
        planted = [
            {"number": number, "numbers": numbers, "logs": (truth(numbers) + shift).tolist()}
            for number, shift in ((-1, NOISE), (0, FAULT), (1, NOISE / 2))[: run.faults + 1]
        ]
        figures = {"loaded_s": 1.0, "served_s": 1.0, "planted": planted}
        figures["turn_s"] = [0.5, 1.0, 1.0]
        (folder / f"rank.{rank}.json").write_text(json.dumps(figures))


def judged(
    out: Path, wrong: tuple[int, ...] = (), changes: int = 2, failed: str = ""
) -> list[dict[str, Any]]:
    """Rows of a reference with two planted faults, a run for its bound, and the plug-in's run."""
    each = {"load": TWELVE, "rounds": 3, "size": "tiny", "ranks": 2, "sequences": 2}
    runs = [
        Run("none", mode="none", faults=2, **each),
        Run("again", mode="none", reference="none", **each),
        Run("moved", mode="plugin", reference="none", changes=changes, **each),
    ]
    for seed, run in enumerate(runs):
        write_run(run, out, seed, wrong if run.name == "moved" else ())
    if failed:
        (out / failed / "outcome").write_text("rank 0: status 1")
    return judge_runs(runs, out)


def test_answers_within_the_noise_of_two_runs_are_not_wrong(tmp_path: Path) -> None:
    _, again, moved = judged(tmp_path)

    assert (moved["compared"], moved["wrong"], moved["wrong_groups"]) == (12, 0, 0)
    assert moved["bounds"] == again["bounds"]
    assert moved["is_expected"]


def test_one_answer_beyond_the_noise_is_wrong_and_so_is_its_group(tmp_path: Path) -> None:
    _, _, moved = judged(tmp_path, wrong=(5,))

    assert (moved["wrong"], moved["wrong_groups"], moved["wrong_rounds"]) == (1, 1, [1])
    assert not moved["is_expected"]


def test_a_planted_fault_below_the_bound_is_counted_as_missed(tmp_path: Path) -> None:
    none, _, _ = judged(tmp_path)

    assert (none["faults"], none["faults_found"]) == (2, 1)
    assert not none["is_expected"]


def test_moves_and_maps_are_counted_from_the_maps_of_the_steps(tmp_path: Path) -> None:
    _, _, moved = judged(tmp_path, changes=3)

    assert (moved["maps"], moved["moves"], moved["first_map_step"]) == (2, 4, 3)
    assert not moved["is_expected"], "three maps were wanted"


def test_speed_is_tokens_of_the_rounds_by_their_seconds(tmp_path: Path) -> None:
    _, _, moved = judged(tmp_path)

    tokens = 4 * (TWELVE.prompt_tokens + TWELVE.answer_tokens)
    assert moved["tokens_s_mean"] == pytest.approx(3 * tokens / 2.5)
    assert moved["tokens_s"][0] == tokens
    assert (moved["ttft_ms"][0], moved["tpot_ms"][0]) == (50, 4)


@pytest.mark.parametrize("failed", ["none", "again", "moved"])
def test_a_run_that_cannot_be_judged_is_not_as_expected(tmp_path: Path, failed: str) -> None:
    _, _, moved = judged(tmp_path, failed=failed)

    assert not moved["is_expected"]
