"""What a deployment takes of memory: each rank, each host, and what that leaves of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from api.deploy.deployment import Deployment

GIB = 2**30
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Costs:
    """Bytes of a deployment; every rank and every host takes the same."""

    record: int  # of one expert
    slots: int  # of a rank: live slots of all layers, spares left out
    spares: int  # of a rank: slots that stay EMPTY between migrations
    staging: int  # of a rank: the staging ring
    cache: int  # of a host: records in its cache, once all were asked for
    num_local_ranks: int
    device: str

    @property
    def rank(self) -> int:
        """Of a rank, on its device."""
        return self.slots + self.spares + self.staging

    @property
    def host(self) -> int:
        """Of a host's memory."""
        of_ranks = self.rank * self.num_local_ranks if self.device == "cpu" else 0
        return self.cache + of_ranks

    @property
    def pinned(self) -> int:
        """Of a host's memory, pages that GPUs have registered and that cannot be swapped."""
        return self.cache if self.device == "cuda" else 0


def costs_of(deployment: Deployment) -> Costs:
    """Count what a deployment takes; loads torch for the layout of a record.

    Raises:
        ConfigError: the host cache has no room for one record.
        CheckpointError: the checkpoint has no such layout.
    """
    given, model = deployment.settings, deployment.model
    record, layers = deployment.schema.record_bytes, model.num_layers
    slots = int(deployment.topology.slots_of_rank[0]) - deployment.spare_slots
    entries = deployment.host_cache.num_entries(layers * model.num_experts)
    return Costs(
        record=record,
        slots=layers * slots * record,
        spares=layers * deployment.spare_slots * record,
        staging=deployment.pace.staging_experts * record,
        cache=entries * record,
        num_local_ranks=given.topology.ranks_per_node,
        device=given.topology.device,
    )


def available_memory() -> int:
    """Bytes of this host's memory that processes may still take, within the cgroup's limit."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    found = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # another version of cgroups, or none
        return found
    return found if limit == "max" else min(found, max(0, int(limit) - used))


def amount(num_bytes: int) -> str:
    """Give bytes as people read them."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def lines_of(costs: Costs) -> list[str]:
    """Give costs as lines for people."""
    where = "GPU memory" if costs.device == "cuda" else "host memory"
    pinned = f", {amount(costs.pinned)} of it pinned" if costs.pinned else ""
    return [
        f"each rank    {amount(costs.rank)} of {where}: slots {amount(costs.slots)}, "
        f"spares {amount(costs.spares)}, staging ring {amount(costs.staging)}",
        f"each host    {amount(costs.host)} of host memory, {amount(costs.cache)} of it in the "
        f"host cache{pinned}",
        f"an expert    {amount(costs.record)}",
    ]
