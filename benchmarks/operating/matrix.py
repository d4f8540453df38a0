"""An hour of load as a matrix: 720 windows of 58 x 256 experts on 32 ranks, from SQLite.

    python -m benchmarks.operating.matrix --runs 5

For each format: seconds and processor seconds of the service from the request to the last byte,
and its greatest memory above rest. The service is a process of its own; the client throws the
bytes away. At rest it has answered one small matrix and one JSON window.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median

import httpx

from benchmarks.operating.load import Now, Size, fill
from telemetry import open_store

SIZE = Size(ranks=32, windows=720, window_s=5.0, events=0)
END = 1_790_000_400.0
SERVE = """
import sys
from api.http.app import create_app
from api.http.server import HttpService
from telemetry import open_store
service = HttpService(create_app(open_store(sys.argv[1], "west")))
service.start()
print(service.url, flush=True)
sys.stdin.read()
service.stop()
"""


def main() -> None:
    """Print one row for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--windows", type=int, default=SIZE.windows)
    parser.add_argument("--formats", nargs="*", default=["npy", "csv"])
    asked = parser.parse_args()
    size = replace(SIZE, windows=asked.windows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.sqlite"
        with closing(open_store(path, "west")) as store:
            fill(store, size, Now(END))
        print(f"store of {path.stat().st_size / 1e6:.0f} MB, load {os.getloadavg()[0]:.1f}")
        print(
            "| format | of | MB | seconds, median | worst | processor s, median | MB above rest |"
        )
        print("|---|---|---|---|---|---|---|")
        for form in asked.formats:
            print(row(path, size, form, asked.runs), flush=True)


def row(path: Path, size: Size, form: str, runs: int) -> str:
    """Measure one format in a fresh service."""
    service = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert service.stdout is not None
    url = service.stdout.readline().strip()
    took, cpus, num_bytes = list[float](), list[float](), 0
    try:
        with httpx.Client(base_url=url, timeout=600.0) as client:
            start = END - size.windows * size.window_s
            read(client, form, END - 60, END)
            rest_mb = peak_mb(service.pid)
            for _ in range(runs):
                cpu, begun = cpu_s(service.pid), time.perf_counter()
                num_bytes = read(client, form, start, END)
                took.append(time.perf_counter() - begun)
                cpus.append(cpu_s(service.pid) - cpu)
            above_mb = peak_mb(service.pid) - rest_mb
    finally:
        service.communicate()
    return (
        f"| {form} | tokens | {num_bytes / 1e6:.1f} | {median(took):.2f} | {max(took):.2f} | "
        f"{median(cpus):.2f} | {above_mb:.1f} |"
    )


def read(client: httpx.Client, form: str, since: float, until: float) -> int:
    """Ask for a matrix and count its bytes."""
    asked = {"since": since, "until": until, "format": form}
    with client.stream("GET", "/api/v1/load/matrix", params=asked) as answer:
        answer.raise_for_status()
        return sum(len(chunk) for chunk in answer.iter_bytes())


def peak_mb(pid: int) -> float:
    """Greatest resident memory of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 1024


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
