"""What every rank of a deployment is given alike: a file that whoever starts the ranks writes.

A serving process imports no ``api`` and reads no TOML. The launcher resolves the configuration and
writes it as JSON into a file that only its user can read, because it holds keys. The environment
variable ``EPLB_RANK_FILE`` names that file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.versions import RANKS, Announcement
from rebalance.assembly.config import RankConfig
from rebalance.assembly.plain import from_plain, to_plain
from rebalance.weights.cache.address import HostCacheAddress
from runtime.experts import ExpertSchema
from telemetry import open_store
from telemetry.state.store import StateStore

RANK_FILE_VARIABLE = "EPLB_RANK_FILE"
VERSION = 4


@dataclass(frozen=True)
class DeploymentDescription:
    """A deployment as its ranks see it.

    Raises:
        ConfigError: an unknown version, or hosts, caches and ranks do not fit together.
    """

    config: RankConfig
    store: str = field(repr=False)  # URL; may hold a password
    model: ModelShape
    schema: ExpertSchema  # of a record, alike for host caches and ranks
    topology: Topology
    device: Literal["cpu", "cuda"]
    hosts: tuple[str, ...]  # address of each host
    host_caches: tuple[HostCacheAddress, ...]  # of each host
    join_key: bytes = field(repr=False)  # ranks prove to each other that they have it
    window_steps: int
    window_seconds: float = 0.0  # 0: windows are of steps
    checkpoint: Path | None = None  # folder of the weights; None: the engine has them
    records: HostCacheAddress | None = (
        None  # where an engine without a checkpoint offers its experts
    )
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ConfigError(
                f"a rank file of version {self.version}, expected {VERSION}: the launcher and "
                "this rank have different releases of eplb"
            )
        num_hosts = int(self.topology.host_of_rank.max()) + 1
        if {len(self.hosts), len(self.host_caches)} != {num_hosts}:
            raise ConfigError(
                f"{len(self.hosts)} hosts and {len(self.host_caches)} host caches, "
                f"expected {num_hosts} of each"
            )
        self.config.check_ranks(self.topology.num_ranks)

    def opened_store(self) -> StateStore:
        """Open the deployment's store.

        Raises:
            StoreError: it cannot be used.
        """
        return open_store(self.store, self.config.deployment)

    def summary(self) -> Mapping[str, str]:
        """What must be alike on every host, in few words; keys, paths and addresses left out."""
        topology, model = self.topology, self.model
        common = replace(self.config, journal_dir=None)
        common = replace(common, network=type(common.network)(), reporting=type(common.reporting)())
        rest = (to_plain(common), to_plain(model), to_plain(topology), self.window_seconds)
        digest = hashlib.blake2b(json.dumps(rest, sort_keys=True).encode(), digest_size=8)
        return {
            "version": Announcement(RANKS, "").version,
            "deployment": self.config.deployment,
            "ranks": str(topology.num_ranks),
            "slots": ", ".join(map(str, sorted(set(topology.slots_of_rank.tolist())))),
            "model": f"{model.num_layers} layers x {model.num_experts} experts, top {model.top_k}",
            "window_steps": str(self.window_steps),
            "device": self.device,
            "record": ", ".join(
                f"{spec.name} {list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
                for spec in self.schema.tensors
            ),
            "settings": digest.hexdigest(),
        }

    def to_json(self) -> str:
        """Give it as text; it holds keys."""
        return json.dumps(to_plain(self))

    @staticmethod
    def read(path: Path) -> DeploymentDescription:
        """Read what a launcher has written.

        Raises:
            ConfigError: the file cannot be read, or is no description of this version.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"rank file {path} cannot be read: {exc}") from exc
        made: DeploymentDescription = from_plain(DeploymentDescription, found)
        return made


def schema_of(hidden: int, intermediate: int, precision: str) -> ExpertSchema:
    """What belongs to an expert of this size in this precision."""
    if precision == "fp8":
        return ExpertSchema.swiglu_fp8(hidden, intermediate)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    return ExpertSchema.swiglu(hidden, intermediate, dtype)
