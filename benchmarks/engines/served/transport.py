"""How ranks that share a GPU reach each other by NCCL: the fastest way that works on a host.

    python -m benchmarks.engines.served.transport [--ranks 4]

========  ==========================================================================================
shared    NCCL 2.30 or later takes several ranks on one GPU and copies in its memory. Their kernels
          must run at once, which needs the GPU's Multi-Process Service (MPS).
alone     the same without MPS: kernels of the ranks take turns
mps       each rank is a host of its own, as NCCL sees it, and talks over loopback; with MPS
sockets   the same without MPS: always works, about 50 ms for an exchange between four ranks
========  ==========================================================================================

``start_mps`` starts a daemon of this user, whose socket and logs are in a folder of its own; no
setting of the GPU is changed. ``stop_mps`` ends it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

WAYS = ("shared", "alone", "mps", "sockets")
FAST_MS = 8.0  # of an exchange: no other way is tried
PROBE_S = 20.0
MPS_S = 15.0
MPS_FOLDER = Path("/tmp/eplb-served-mps")
EXCHANGES = 60


def libraries() -> list[Path]:
    """The NCCL libraries that can be imported, first the one that is preferred."""
    import nvidia.nccl

    paths = [Path(place) / "lib/libnccl.so.2" for place in nvidia.nccl.__path__]
    return [path for path in paths if path.exists()]


def environment_of(way: str, rank: int, library: Path) -> dict[str, str]:
    """Variables of a rank for a way."""
    variables = {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "VLLM_NCCL_SO_PATH": str(library),
        # torch and vLLM use one NCCL.
        "LD_PRELOAD": str(library),
    }
    if way in ("shared", "alone"):
        variables["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        variables |= {
            "NCCL_HOSTID": f"rank{rank}",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
        }
    if way in ("shared", "mps"):
        variables |= mps_environment()
    return variables


def mps_environment() -> dict[str, str]:
    """Variables by which a process finds the daemon."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(MPS_FOLDER / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(MPS_FOLDER / "log"),
    }


def start_mps() -> bool:
    """Start the daemon; whether it runs."""
    for name in ("pipe", "log"):
        (MPS_FOLDER / name).mkdir(parents=True, exist_ok=True)
    return control_mps("-d", "") == 0


def stop_mps() -> None:
    """End the daemon."""
    control_mps("", "quit\n")
    shutil.rmtree(MPS_FOLDER, ignore_errors=True)


def control_mps(option: str, words: str) -> int:
    """Status of the daemon's control; not 0 where there is none, or it does not answer."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        return 127
    try:
        # No pipes for its output: the daemon would keep them open.
        return subprocess.run(
            [control, *option.split()],
            input=words.encode(),
            env={**os.environ, **mps_environment()},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=MPS_S,
            check=False,
            start_new_session=True,
        ).returncode
    except subprocess.TimeoutExpired:
        return 124


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def probe(way: str, ranks: int, library: Path) -> float:
    """Milliseconds of an all-gather and a reduce-scatter; infinite where the way does not work."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--probe", str(rank), port, "--ranks", str(ranks)],
            env={**os.environ, **environment_of(way, rank, library)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for rank in range(ranks)
    ]
    end = time.monotonic() + PROBE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.05)
    for process in processes:
        process.kill()
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        return float("inf")
    return float(printed[0])


def exchange(rank: int, ranks: int, port: str) -> None:
    """One rank of a probe; rank 0 prints the milliseconds."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=ranks)
    own = torch.full((64, 512), float(rank), device="cuda")
    everyone = torch.empty(64 * ranks, 512, device="cuda")
    began = 0.0
    for number in range(EXCHANGES + 10):
        if number == 10:
            torch.cuda.synchronize()
            began = time.perf_counter()
        dist.all_gather_into_tensor(everyone, own)
        dist.reduce_scatter_tensor(own, everyone)
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    own.fill_(float(rank))
    dist.all_gather_into_tensor(everyone, own)
    expected = torch.arange(ranks, device="cuda").repeat_interleave(64).float()
    if not torch.equal(everyone[:, 0], expected):
        sys.exit("the ranks did not get each other's rows")
    if rank == 0:
        print(1e3 * took / EXCHANGES)
    dist.destroy_process_group()


def choose(ranks: int, note: Callable[[str], None]) -> tuple[str, Path]:
    """The fastest way, and the NCCL library of it; MPS runs if the way needs it."""
    best = ("sockets", libraries()[-1], float("inf"))
    has_mps = start_mps()
    note(f"MPS {'runs' if has_mps else 'does not start'}")
    for way in WAYS:
        is_mute = way in ("shared", "mps") and not has_mps
        if is_mute or (way == "sockets" and best[2] < float("inf")):
            continue
        library = libraries()[0] if way in ("shared", "alone") else libraries()[-1]
        took = probe(way, ranks, library)
        note(f"{way}: {took:.2f} ms an exchange")
        if took < best[2]:
            best = (way, library, took)
        if took < FAST_MS:
            break
    if best[0] not in ("shared", "mps"):
        stop_mps()
    return best[0], best[1]


def main() -> None:
    """Probe the ways, or be one rank of a probe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--probe", nargs=2)
    options = parser.parse_args()
    if options.probe:
        exchange(int(options.probe[0]), options.ranks, options.probe[1])
        return
    print(*choose(options.ranks, print))
    stop_mps()


if __name__ == "__main__":
    main()
