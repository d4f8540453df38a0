"""Serve a model on a GPU without EPLB, with vLLM's own and with the plug-in, and judge the answers.

    python -m benchmarks.engines.served.serve OUT --plan proof --ranks 4

``OUT/served.json`` and ``OUT/served.md`` have the table; a folder for each run has its log. The
next run loads while one serves. Status 0: every row is as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines.served import transport
from benchmarks.engines.served.judge import judge_runs, outcome_of, write_table
from benchmarks.engines.served.model import write_model
from benchmarks.engines.served.run import Run

LOAD_DEADLINE_S = 150.0
STOP_GRACE_S = 10.0
AHEAD = 3  # runs at once, unless it is given: one serves, the others load
KV_BYTES = 1 << 30  # of one rank


@dataclass(frozen=True)
class Place:
    """Where the ranks run."""

    on_gpu: bool
    share: float  # of the GPU's memory, or of the host's without a GPU, for one rank
    num_gpus: int = 1
    way: str = "sockets"  # as ``transport`` names them
    library: Path = Path()  # NCCL


def plugin_file(run: Run, folder: Path) -> Path:
    """Write the plug-in's configuration of a run."""
    settings = {
        "deployment.name": '"served"',
        "deployment.store": f'"sqlite:{folder}/store.db"',
        "telemetry.sample_steps": "16",
        "telemetry.window_steps": "64",
        **run.settings,
    }
    sections: dict[str, list[str]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, []).append(f"{key} = {value}")
    path = folder / "eplb.toml"
    path.write_text(
        "\n".join(f"[{name}]\n" + "\n".join(lines) for name, lines in sections.items()) + "\n"
    )
    return path


def environment_of(run: Run, rank: int, port: int, folder: Path, place: Place) -> dict[str, str]:
    """Variables of one rank."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_PLUGINS": "eplb,served",
        "EPLB_SERVED_WATCH": "1",
        "OMP_NUM_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
    }
    if run.ranks > 1:
        variables |= {
            "VLLM_DP_RANK": str(rank),
            "VLLM_DP_RANK_LOCAL": str(rank % place.num_gpus if place.on_gpu else rank),
            "VLLM_DP_SIZE": str(run.ranks),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": str(port),
        }
    if place.on_gpu:
        variables |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_V2_MODEL_RUNNER": "1"}
        variables |= transport.environment_of(place.way, rank, place.library)
    if run.mode == "plugin":
        variables["EPLB_CONFIG"] = str(plugin_file(run, folder))
    return {**os.environ, **variables}


class Started:
    """The processes of one run."""

    def __init__(self, run: Run, folder: Path, model: Path, place: Place) -> None:
        self.run, self.folder, on_gpu = run, folder, place.on_gpu
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        port, board = transport.free_port(), transport.free_port()
        # The cache's size is given, not measured: other runs load and end meanwhile.
        options: dict[str, Any] = {"gpu_memory_utilization": place.share}
        options["kv_cache_memory_bytes"] = KV_BYTES if on_gpu else KV_BYTES >> 4
        if on_gpu:
            options |= {"attention_backend": "TRITON_ATTN", "moe_backend": "triton"}
            options |= {"enable_trace_replay": True}
        if run.quantization:
            options["quantization"] = run.quantization
        if "sleep" in run.incidents.values():
            options["enable_sleep_mode"] = True
        self.processes = []
        for rank in range(run.ranks):
            job = {
                **asdict(run),
                "rank": rank,
                "model": str(model),
                "out": str(folder),
                "go": str(folder / "go"),
                "board_port": board,
                "forced": on_gpu,
                "options": options,
            }
            path = folder / f"job.{rank}.json"
            path.write_text(json.dumps(job))
            with (folder / f"log.{rank}").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.engines.served.rank", str(path)],
                    env=environment_of(run, rank, port, folder, place),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.processes.append(process)

    def wait_loaded(self) -> str:
        """Wait until all ranks are loaded; "" or what went wrong."""
        ready, end = self.folder / "ready", time.monotonic() + LOAD_DEADLINE_S
        while not ready.exists():
            if failed := self._failed():
                return failed
            if time.monotonic() > end:
                return f"not loaded after {LOAD_DEADLINE_S:.0f} s"
            time.sleep(0.1)
        return ""

    def begin(self) -> None:
        """Let the ranks serve."""
        (self.folder / "go").touch()

    def wait_served(self) -> str:
        """Wait until all ranks have ended; "" or what went wrong."""
        end = time.monotonic() + self.run.at_most_s + 120
        while any(process.poll() is None for process in self.processes):
            if failed := self._failed():
                return failed
            if time.monotonic() > end:
                return "the ranks did not end"
            time.sleep(0.1)
        return self._failed()

    def _failed(self) -> str:
        states = [process.poll() for process in self.processes]
        failed = [f"rank {rank}: status {state}" for rank, state in enumerate(states) if state]
        return "; ".join(failed)

    def end(self) -> None:
        """End what still runs, with the processes that a rank has started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + STOP_GRACE_S
            for process in self.processes:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    continue
            while any(process.poll() is None for process in self.processes):
                if time.monotonic() > end:
                    break
                time.sleep(0.1)


def serve_all(
    runs: Sequence[Run],
    out: Path,
    models: Path,
    place: Place,
    within_s: float,
    note_served: Callable[[], None],
    ahead: int,
    is_quiet: bool,
) -> None:
    """Serve the runs one after another, while the next ones load; in the time that is given.

    ``is_quiet``: none loads while one serves.
    """
    waiting, loading = list(runs), list[Started]()
    began = time.monotonic()

    def load_more() -> None:
        while waiting and len(loading) < ahead:
            run = waiting.pop(0)
            model = models / f"{run.size}-{run.dtype}"
            device = "cuda" if place.on_gpu else "cpu"
            write_model(model, run.size, run.dtype, run.load.seed, device)
            loading.append(Started(run, out / run.name, model, place))

    load_more()
    try:
        while loading:
            current = loading[0]
            failed = current.wait_loaded()
            if is_quiet:
                for other in loading[1:]:
                    other.wait_loaded()
            current.begin()
            if time.monotonic() - began < within_s and not is_quiet:
                load_more()
            failed = failed or current.wait_served()
            loading.pop(0).end()
            seconds = time.monotonic() - began
            (current.folder / "outcome").write_text(failed)
            print(f"{seconds:7.1f} s  {current.run.name}: {failed or 'served'}", flush=True)
            note_served()
            if seconds > within_s:
                break
            if is_quiet and not loading:
                load_more()
    finally:
        for started in loading:
            started.end()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve, judge and write the table."""
    from benchmarks.engines.served.plans import PLANS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--plan", choices=sorted(PLANS), required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", nargs="*", help="names of runs; the others are left out")
    parser.add_argument("--models", type=Path, default=Path("/tmp/served-models"))
    parser.add_argument("--share", type=float, default=0.05, help="of the GPU for one rank")
    parser.add_argument("--within", type=float, default=3600, help="seconds in which runs start")
    parser.add_argument("--way", choices=transport.WAYS, help="default: own, or sockets if shared")
    parser.add_argument("--ahead", type=int, default=AHEAD, help="runs that are started at once")
    parser.add_argument("--quiet", action="store_true", help="nothing loads while a run serves")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    # As an exception: the ranks are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("serve: ended"))
    on_gpu = options.device == "cuda"
    place = Place(on_gpu, options.share)
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            print("serve: torch sees no GPU, expected an NVIDIA GPU", file=sys.stderr)
            return 2
        gpus = torch.cuda.device_count()
        way = options.way or ("own" if options.ranks <= gpus else "sockets")
        place = Place(on_gpu, options.share, gpus, way, transport.library())
    runs = PLANS[options.plan](options.ranks)
    if options.only:
        runs = [run for run in runs if run.name in options.only]
    options.out.mkdir(parents=True, exist_ok=True)

    def judge() -> list[dict[str, Any]]:
        rows = judge_runs(runs, options.out)
        write_table(rows, options.out, {**vars(options), "way": place.way, "gpus": place.num_gpus})
        return rows

    ahead, is_quiet = options.ahead, options.quiet
    serve_all(runs, options.out, options.models, place, options.within, judge, ahead, is_quiet)
    wide = [run.name for run in runs if run.size == "wide" and not outcome_of(run, options.out)]
    if on_gpu and wide:
        timing = [sys.executable, "-m", "benchmarks.engines.served.experts_time"]
        subprocess.run([*timing, str(options.out), *wide], check=False)
    rows = judge()
    print((options.out / "served.md").read_text())
    return 0 if all(row["is_expected"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
