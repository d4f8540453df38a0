"""From a checkpoint on disk to the first right token, by the commands of a deployment.

    python -m benchmarks.deployment.first_token FOLDER [--layers 7] [--runs 3]

Writes a checkpoint with the shapes of Qwen3-30B-A3B's MoE layers (128 experts of 9.4 MB) and random
bytes, and its record file: 8.5 GB each with 7 layers, both removed at the end. Every start is of
``eplb host-cache`` and ``eplb launch`` with two CPU ranks, whose first pass is compared with the
checkpoint's own tensors. *Cold*: the pages of both files are dropped (fsync, then
POSIX_FADV_DONTNEED). *Warm*: the file was read through the page cache just before. Starts and plain
reads (dd, O_DIRECT) of the record file take turns. Prints one table. Seeded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

import numpy as np

from benchmarks.migration.preload import drop_cache, read_with_dd
from benchmarks.result_table import Row, show
from rebalance.weights.disk.record_file import record_file_beside
from runtime.checkpoints.checkpoint import INDEX_FILE, Checkpoint
from runtime.experts import ExpertSchema
from tests.support.record_files import make_all
from tests.support.redis_servers import free_port

ROOT = Path(__file__).parents[2]
EPLB = Path(sys.executable).with_name("eplb")
START_DEADLINE_S, END_DEADLINE_S = 1800.0, 90.0
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, NUM_RANKS = 128, 8, 2048, 768, 2
CONFIG = """
[deployment]
name = "{name}"
[model]
checkpoint = "weights"
precision = "bfloat16"
[topology]
ranks_per_node = 2
slots_per_rank = 64
staging_experts = 2
device = "cpu"
[network]
rendezvous_port = {port}
join_deadline_s = 600.0
fill_deadline_s = 1800.0
[host_cache]
records = 128
record_file = {record_file}
[supervision]
restart_after_death = 0
"""
MODEL = {
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


def write_checkpoint(folder: Path, layers: int, seed: int) -> None:
    """One shard a layer: random BF16 bytes that stand for numbers from 2**-7 to 2**-5."""
    folder.mkdir()
    names: dict[str, str] = {}
    for layer in range(layers):
        header: dict[str, Any] = {}
        shard, offset = f"layer-{layer}.safetensors", 0
        size = 2 * HIDDEN * INTERMEDIATE
        for expert in range(EXPERTS):
            for part in ("gate", "up", "down"):
                shape = [HIDDEN, INTERMEDIATE] if part == "down" else [INTERMEDIATE, HIDDEN]
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                span = [offset, offset + size]
                header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": span}
                names[name], offset = shard, offset + size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        random = np.random.default_rng((seed, layer))
        with (folder / shard).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _ in range(3 * EXPERTS):
                raw = np.frombuffer(random.bytes(size), np.uint16)
                file.write((raw & 0x80FF | 0x3C00).tobytes())
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
    (folder / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": layers}))


class Command:
    """One command in a session of its own, with its output in a file."""

    def __init__(self, role: str, words: Sequence[str], folder: Path) -> None:
        self.role, self.output = role, folder / f"{role}.log"
        with self.output.open("wb") as printed:
            self.process = subprocess.Popen(
                words,
                cwd=folder,
                env=os.environ | {"EPLB_CONFIG": "eplb.toml", "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self) -> int:
        """Ask it to end; returns the exit status."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_DEADLINE_S)

    def kill(self) -> None:
        """End all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(END_DEADLINE_S)


class Starts:
    """Whole starts on one checkpoint."""

    def __init__(self, folder: Path, layers: int) -> None:
        self.folder, self.weights = folder, folder / "weights"
        self.records = record_file_beside(self.weights)
        self.bytes = 0
        self._num_experts = layers * EXPERTS

    def files(self) -> list[Path]:
        """Everything large."""
        found = sorted(self.weights.glob("*.safetensors"))
        return found + [self.records] * self.records.exists()

    def run(self, *, has_records: bool) -> dict[str, float]:
        """One start up to the first token; returns its seconds.

        Raises:
            SystemExit: a command failed, or a token is wrong.
        """
        for old in self.folder.glob("rank-*.json"):
            old.unlink()
        shutil.rmtree(self.folder / ".eplb", ignore_errors=True)
        given = {"name": f"first-{os.getpid()}", "port": free_port()}
        text = CONFIG.format(record_file=str(has_records).lower(), **given)
        (self.folder / "eplb.toml").write_text(text)
        engine = [sys.executable, "-m", "benchmarks.deployment.first_token_engine"]
        begun = time.monotonic()
        with ExitStack() as stack:
            cache = Command("host-cache", [str(EPLB), "host-cache"], self.folder)
            stack.callback(cache.kill)
            words = [str(EPLB), "launch", "--", *engine, str(self.folder)]
            launch = Command("launch", words, self.folder)
            stack.callback(launch.kill)
            deadline = time.monotonic() + START_DEADLINE_S
            while launch.process.poll() is None:
                if time.monotonic() > deadline:
                    raise SystemExit("the ranks have not ended in time")
                Event().wait(0.2)
            if launch.process.returncode:
                raise SystemExit(f"{launch.output.read_text()}\n{cache.output.read_text()}")
            cache.end()
        paths = sorted(self.folder.glob("rank-*.json"))
        ranks = [json.loads(path.read_text()) for path in paths]
        if len(ranks) != NUM_RANKS or not all(rank["is_right"] for rank in ranks):
            raise SystemExit(f"wrong first tokens: {ranks}")
        self.bytes = self._num_experts * ranks[0]["record_bytes"]
        times = [rank["times"] for rank in ranks]
        fill_begin = min(one["fill_begin"] for one in times)
        fill_end = max(one["fill_end"] for one in times)
        first = max(one["first_token"] for one in times)
        return {
            "total": first - begun,
            "before": fill_begin - begun,
            "fill": fill_end - fill_begin,
            "after": first - fill_end,
            "cpu": sum(one["fill_cpu"] for one in times),
        }


def measure(starts: Starts, num_runs: int) -> list[Row]:
    """Starts and plain reads in turns."""
    found: dict[str, list[dict[str, float]]] = {"record file, cold": [], "record file, warm": []}
    plain_s: list[float] = []
    for path in starts.files():
        drop_cache(path)
    found["repack, no record file, cold"] = [starts.run(has_records=False)]
    made = time.monotonic()
    checkpoint = Checkpoint(starts.weights)
    schema = ExpertSchema.swiglu(HIDDEN, INTERMEDIATE, checkpoint.schema().tensors[0].dtype)
    make_all(checkpoint, checkpoint.model_shape(), schema, starts.records)
    made = time.monotonic() - made
    del checkpoint  # its mapped pages could not be dropped
    for _ in range(num_runs):
        for name in ("record file, cold", "record file, warm"):
            for path in starts.files():
                drop_cache(path)
            plain_s.append(read_with_dd(starts.records))
            if name.endswith("warm"):
                subprocess.run(["cat", str(starts.records)], stdout=subprocess.DEVNULL, check=True)
            found[name].append(starts.run(has_records=True))
    gb = starts.bytes / 1e9
    plain = gb / median(plain_s)
    rows: list[Row] = [
        ("record file", f"{gb:.2f} GB", ">= 8 GB"),
        ("plain O_DIRECT read (dd, 16 MB)", f"{plain:.2f} GB/s, {_spread(plain_s, gb)}", "-"),
        ("make_all: repack and write all records", f"{gb / made:.2f} GB/s", "-"),
    ]
    for name, starts_s in found.items():
        fill = [one["fill"] for one in starts_s]
        rate, total = gb / median(fill), median(one["total"] for one in starts_s)
        before, after = (median(one[key] for one in starts_s) for key in ("before", "after"))
        target = ">= 85 %" if name == "record file, cold" else "-"
        share = f"{rate:.2f} GB/s, {rate / plain:.0%} of dd, {_spread(fill, gb)}"
        rows.append((f"{name}: into the ranks' slots", share, target))
        words = f"{total:.1f} s: {before:.1f} s before the fill, {after:.1f} s after it"
        cpu = gb / median(one["cpu"] for one in starts_s)
        rows.append(
            ("  processor time of the ranks' filling threads", f"{cpu:.2f} GB a second", "-")
        )
        rows.append(("  from the commands to the first right token", words, "-"))
    return rows


def _spread(seconds: list[float], gb: float) -> str:
    return f"{gb / max(seconds):.2f} to {gb / min(seconds):.2f} of {len(seconds)}"


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--layers", type=int, default=7, help="1.2 GB each, on disk twice")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="first-token-", dir=given.folder))
    try:
        write_checkpoint(scratch / "weights", given.layers, given.seed)
        rows = measure(Starts(scratch, given.layers), given.runs)
    finally:
        shutil.rmtree(scratch)
    show(rows, max(len(row[0]) for row in rows))


if __name__ == "__main__":
    main()
