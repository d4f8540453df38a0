"""SGLang serves with several ranks on GPUs (or on CPUs), with and without the plug-in.

    python -m benchmarks.engines.served.sglang_serve MODEL OUT --ranks 2 --modes none engine plugin

Each mode is a start of its own: ``none`` has no balancer, ``engine`` has SGLang's own, ``plugin``
has ours in it, and ``planted`` is ``none`` with two experts exchanged in one layer: the answers
must show it, or they prove nothing. ``single`` is one rank: it sums in another order than several
do, so its distance from ``none`` is what rounding alone may make.

The environment has SGLang and this project installed, with their metadata: the engine finds
plug-ins by their entry points.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.served import transport
from benchmarks.engines.served.load import Load

MODES = (
    "none",
    "again",
    "single",
    "planted",
    "engine",
    "plugin",
    "plugin-planted",
    "plugin-records",
)
DEPLOYMENT = """
[deployment]
name = "served"
store = "sqlite:{store}"

[telemetry]
window_steps = 16

[engine]
load_deadline_s = 240
phase = "auto"
records = "{records}"
"""


def links_of(rank: int, way: str, nccl: Path) -> dict[str, str]:
    """Variables of a rank on a GPU: which one it has, and how it reaches the others."""
    variables = transport.environment_of(way, rank, nccl)
    if way == "own":
        variables["CUDA_VISIBLE_DEVICES"] = str(rank)
    return variables


def start_ranks(job: dict[str, Any], mode: str, out: Path, given: Any) -> list[Any]:
    """Start all ranks of one mode."""
    balancer = {"again": "none", "single": "none", "planted": "none"}.get(mode, mode.split("-")[0])
    ranks = 1 if mode == "single" else given.ranks
    common = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        "SGLANG_NUMA_BIND_V2": "0",
        "SGLANG_PLUGINS": "eplb,served-watch",
    }
    if "planted" in mode:
        common["SERVED_PLANT"] = str(given.plant_at)
    if balancer == "plugin":
        settings = out / "eplb.toml"
        records = "on" if "records" in mode else "off"
        store = (out / "store.db").resolve()
        settings.write_text(DEPLOYMENT.format(store=store, records=records))
        common["EPLB_CONFIG"] = str(settings)
    started = []
    for rank in range(ranks):
        place = out / f"job.{rank}.json"
        place.write_text(json.dumps(job | {"mode": balancer, "rank": rank, "ranks": ranks}))
        environment = common | {"SERVED_WATCH": str((out / f"seen.{rank}.npz").resolve())}
        if given.device == "cuda":
            environment |= links_of(rank, given.way, transport.library())
        else:
            cores = [str(number % (os.cpu_count() or 1)) for number in range(ranks)]
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores)
            environment |= {"SERVED_ON_CPU": "1", "SGLANG_NCCL_SO_PATH": "/nonexistent"}
        log = (out / f"rank.{rank}.log").open("w")
        module = "benchmarks.engines.served.sglang_rank"
        command = [sys.executable, "-u", "-m", module, str(place)]
        started.append(
            subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        )
    return started


def serve_mode(mode: str, given: Any, port: int) -> str:
    """Serve one mode; "" or why it did not end."""
    out = Path(given.out) / mode
    out.mkdir(parents=True, exist_ok=True)
    load = Load(
        num_prompts=given.rounds * given.per_round,
        per_round=given.per_round,
        prompt_tokens=given.prompt_tokens,
        answer_tokens=given.answer_tokens,
        rounds_of_topic=given.rounds_of_topic,
        seed=3,
    )
    job = {
        "model": given.model,
        "out": str(out),
        "load": asdict(load),
        "port": port,
        "options": json.loads(given.options),
    } | {
        name: getattr(given, name)
        for name in ("dtype", "redundant", "interval", "rounds", "decoded", "device", "graphs")
    }
    begin, deadline = time.monotonic(), time.monotonic() + given.at_most_s
    ranks = start_ranks(job, mode, out, given)
    problem = ""
    while not (out / "done").exists() and not problem:
        ended = [rank for rank, one in enumerate(ranks) if one.poll() is not None]
        if ended and not (out / "done").exists():
            problem = f"rank {ended[0]} ended with status {ranks[ended[0]].returncode}"
        elif time.monotonic() > deadline:
            problem = f"not done after {given.at_most_s} s"
        time.sleep(0.1)
    if not problem:
        time.sleep(given.linger_s)  # what waits for the store is written
    for one in ranks:
        try:
            os.killpg(one.pid, signal.SIGTERM)
        except ProcessLookupError:
            continue
    time.sleep(2)
    for one in ranks:
        try:
            os.killpg(one.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        one.wait()
    print(f"{mode}: {problem or 'served'}, {time.monotonic() - begin:.0f} s", flush=True)
    return problem


def watched(out: Path, ranks: int) -> dict[str, float]:
    """Figures of what a run's first rank has seen; imbalance by the map of each pass."""
    with np.load(out / "seen.0.npz") as seen:
        tokens, maps = seen["tokens"].astype(np.int64), seen["maps"]
        seen_map = seen["map_of_pass"]
    by_rank = tokens.reshape(*tokens.shape[:2], ranks, -1).sum(axis=3)  # [P, L, R]
    by_rank = by_rank[:, by_rank.any(axis=(0, 2))]  # rows with experts
    changes = sum(int((one != other).any()) for one, other in itertools.pairwise(maps))
    moved = sum(int((one != other).sum()) for one, other in itertools.pairwise(maps))
    return {
        "passes": len(tokens),
        "maps": changes,
        "first_change": int(np.argmax(seen_map > 0)),
        "moves": moved,
        "imbalance": float(by_rank.max(axis=2).sum() / by_rank.mean(axis=2).sum()),
        "busiest": int(by_rank.max(axis=2).sum()),
    }


def distances(out: Path, base: Path, per_round: int) -> dict[str, Any]:
    """How far the answers of a run are from those of another.

    The first round is over before a map has changed: its distance is what other sums alone make,
    and that of each later round is to be compared with it.
    """
    with np.load(out / "answers.npz") as own, np.load(base / "answers.npz") as other:
        size = min(len(own["given"]), len(other["given"]))
        given = np.abs(own["given"][:size] - other["given"][:size])
        same = own["tokens"][:size] == other["tokens"][:size]
        ahead = np.cumprod(same, axis=1).astype(bool)  # up to the first other token
        logs = np.abs(own["logs"][:size] - other["logs"][:size])[ahead]
    by_round = given.reshape(-1, per_round * given.shape[1]).mean(axis=1)
    return {
        "texts": size,
        "given_by_round": [round(float(mean), 5) for mean in by_round],
        "given_mean": float(given.mean()),
        "given_p999": float(np.quantile(given, 0.999)),
        "given_max": float(given.max()),
        "same_answers": int(same.all(axis=1).sum()),
        "same_tokens": float(ahead.mean()),
        "decoded_max": float(logs.max()) if logs.size else 0.0,
    }


def row_of(mode: str, problem: str, given: Any) -> dict[str, Any]:
    """What a mode has shown; its distances are from ``none``."""
    out, base = Path(given.out) / mode, Path(given.out) / "none"
    row: dict[str, Any] = {"mode": mode, "problem": problem}
    if (out / "seen.0.npz").exists():
        row |= watched(out, 1 if mode == "single" else given.ranks)
    if (out / "answers.npz").exists() and (base / "answers.npz").exists():
        row |= distances(out, base, given.per_round)
        with np.load(out / "answers.npz") as answers:
            row["round_s"] = float(np.median(answers["seconds"]))
    return row


def main() -> None:
    """Serve the modes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["none", "engine", "plugin"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--redundant", type=int, default=8)
    parser.add_argument("--interval", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--way", choices=transport.WAYS, help="default: own, or sockets if shared")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--rounds-of-topic", type=int, default=8)
    parser.add_argument("--per-round", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--decoded", type=int, default=32)
    parser.add_argument("--plant-at", type=int, default=40)
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--options", default="{}", help="further options of the engine, JSON")
    parser.add_argument("--at-most-s", type=float, default=150)
    parser.add_argument("--at-once", action="store_true", help="all modes at the same time")
    parser.add_argument("--linger-s", type=float, default=3)
    given = parser.parse_args()
    if given.way is None and given.device == "cuda":
        import torch

        given.way = "own" if given.ranks <= torch.cuda.device_count() else "sockets"
    ports = [20000 + os.getpid() % 20000 + 200 * number for number in range(len(given.modes))]
    at_once = len(given.modes) if given.at_once else 1
    with ThreadPoolExecutor(at_once) as pool:
        problems = list(
            pool.map(lambda mode, port: serve_mode(mode, given, port), given.modes, ports)
        )
    for mode, problem in zip(given.modes, problems, strict=True):
        row = row_of(mode, problem, given)
        print(json.dumps(row), flush=True)
        with (Path(given.out) / "rows.jsonl").open("a") as rows:
            rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
