"""Time and memory of the readers on dumps of the size of real ones.

    python -m benchmarks.engine_files.speed --runs 11

Processor time, because other work on the machine decides wall time. Memory is the growth of the
largest resident size of a process of its own, over that before the file is read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.engine_files.seeds import torch_file
from telemetry.formats.table import read_load
from telemetry.formats.types import ReadOptions

ROOT = Path(__file__).resolve().parents[2]


def make_stat(path: Path) -> None:
    """A dump of DeepSeek-V3's shape, 59 MB: 1,000 steps x 58 layers x 256 experts of int32."""
    steps = np.random.default_rng(0).integers(0, 500, (1000, 58, 256), dtype=np.int32)
    dump = {"rank": 0, "logical_count": steps, "average_utilization_rate_over_window": None}
    try:
        import torch
    except ImportError:  # the same archive, without torch
        path.write_bytes(torch_file(dump))
        return
    torch.save(dump | {"logical_count": torch.from_numpy(steps)}, path)


def measure(path: Path, name: str) -> tuple[float, float, float]:
    """Processor and wall seconds of one read, and MB that it grew by; in a process of its own."""
    code = "import sys; from benchmarks.engine_files.speed import child; child(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(path), name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    cpu_s, wall_s, grown = json.loads(done.stdout)
    return cpu_s, wall_s, grown


def child(path: str, name: str) -> None:
    if name == "torch":
        import torch

        torch.zeros(1)
    before = peak_kb(restart=True)
    cpu, wall = time.process_time(), time.perf_counter()
    if name == "torch":
        torch.load(path, map_location="cpu", weights_only=True)
    else:
        read_load(path, ReadOptions(), name)
    took = time.process_time() - cpu, time.perf_counter() - wall
    grown = (peak_kb() - before) / 1024
    assert name == "torch" or "torch" not in sys.modules, "read without torch"
    print(json.dumps([*took, grown]))


def peak_kb(*, restart: bool = False) -> int:
    """Largest resident size so far; the resource module's includes that of the parent process."""
    if restart:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=11)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stat.pt"
        make_stat(path)
        size_mb = path.stat().st_size / 2**20
        print("| what | CPU s median | p99 | wall s median | grown MB | x the file |")
        print("|---|---|---|---|---|---|")
        names = ["sglang-dump"] + (["torch"] if "torch" in sys.modules else [])
        for name in names:
            runs = [measure(path, name) for _ in range(given.runs)]
            cpu, wall, grown = zip(*runs, strict=True)
            print(
                f"| {name}, {size_mb:.1f} MiB | {statistics.median(cpu):.3f} | {max(cpu):.3f} | "
                f"{statistics.median(wall):.3f} | {max(grown):.1f} | {max(grown) / size_mb:.2f} |"
            )


if __name__ == "__main__":
    main()
