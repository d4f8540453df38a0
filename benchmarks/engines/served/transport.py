"""How ranks reach each other by NCCL.

=======  ===========================================================================================
own      each rank has a GPU of its own; NCCL chooses NVLink or the bus, as in a deployment
sockets  ranks share GPUs: each is a host of its own, as NCCL sees it, and talks over loopback, at
         about 50 ms for an exchange between four ranks on one GPU
direct   ranks share GPUs: NCCL 2.30 or later takes several ranks on one GPU and copies in its
         memory; no engine has served by it yet. Under the GPU's Multi-Process Service an exchange
         alone was fast, but vLLM's first pass never ended
=======  ===========================================================================================
"""

from __future__ import annotations

import socket
from pathlib import Path

WAYS = ("own", "sockets", "direct")


def library() -> Path:
    """The NCCL library that is imported first."""
    import nvidia.nccl

    paths = [Path(place) / "lib/libnccl.so.2" for place in nvidia.nccl.__path__]
    return next(path for path in paths if path.exists())


def environment_of(way: str, rank: int, nccl: Path) -> dict[str, str]:
    """Variables of a rank for a way."""
    variables = {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "VLLM_NCCL_SO_PATH": str(nccl),
        "LD_PRELOAD": str(nccl),  # torch and vLLM use one NCCL
    }
    if way == "own":
        return variables
    if way == "direct":
        return variables | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    own_host = {"NCCL_HOSTID": f"rank{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    return variables | own_host


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])
