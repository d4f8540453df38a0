"""The part of ``eplb check`` that looks at GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from api.deploy.checks.costs import Costs, amount
from api.deploy.checks.finding import Finding
from eplb.errors import ConfigError
from runtime.dispatch.deepep import load_deep_ep


def check_gpu_host(costs: Costs) -> Iterator[Finding]:
    """Check the GPUs of this host, which ranks get in order."""
    found, needed = torch.cuda.device_count(), costs.num_local_ranks
    if found < needed:
        yield Finding("GPUs", f"{found} GPUs for {needed} ranks of this host", "one for each")
    else:
        yield Finding("GPUs", f"{found} for {needed} ranks")
        yield from _check_peers(needed)
        for gpu in range(needed):
            yield _check_room(gpu, costs)
    try:
        load_deep_ep()
        yield Finding("DeepEP", "can be imported")
    except ConfigError as exc:  # not needed: NCCL's all-to-all takes its place
        yield Finding("DeepEP", f"not used, all-to-all over NCCL takes its place: {exc}")


def _check_peers(num_gpus: int) -> Iterator[Finding]:
    apart = [
        f"{one}-{other}"
        for one in range(num_gpus)
        for other in range(num_gpus)
        if one != other and not torch.cuda.can_device_access_peer(one, other)
    ]
    if apart:  # slower, and right all the same
        pairs = ", ".join(apart[:8])
        yield Finding("GPU peers", f"{pairs} cannot read each other: weights go through the host")
    else:
        yield Finding("GPU peers", "all can read each other's memory")


def _check_room(gpu: int, costs: Costs) -> Finding:
    free, total = torch.cuda.mem_get_info(gpu)
    left = free - costs.rank
    found = (
        f"{amount(costs.rank)} of {amount(total)} for experts, {amount(max(left, 0))} of what is "
        "free now left for the other weights and the KV cache"
    )
    if left < 0:
        return Finding(f"GPU {gpu}", f"{amount(free)} free", f"{amount(costs.rank)} for experts")
    return Finding(f"GPU {gpu}", found)
