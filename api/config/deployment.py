"""Sections of a deployment: its model, its ranks and hosts, and its network.

The commands of a deployment read them (``eplb serve``, ``eplb launch``, ...); the demo has the same
in its own section, because it makes its model and its hosts itself.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import ValidationInfo, field_validator

from api.config.fields import HOUR_S, Number, Section, Whole, files_together, setting
from eplb.shares.switches import BatchSwitches, CountExchange, SharedExpert
from rebalance.build.config import NetworkConfig
from rebalance.weights.link.tls import Certificate, TlsFiles

Precision = Literal["float32", "bfloat16", "fp8"]
Layout = Literal["eplb", "transformers"]


class ModelSettings(Section):
    """The model of a deployment: shapes, or a checkpoint whose `config.json` gives them.

    A shape that is given beside a `config.json` must agree with it.
    """

    checkpoint: Path | None = setting(None, "folder of the weights; none: the engine loads them")
    layers: Whole = setting(0, "MoE layers; 0: those of the checkpoint", ge=0, le=1024)
    experts: Whole = setting(
        0, "experts of each layer; 0: those of the checkpoint", ge=0, le=65_536
    )
    top_k: Whole = setting(
        0, "experts that each token is routed to; 0: those of the checkpoint", ge=0, le=256
    )
    hidden: Whole = setting(0, "width of a token; 0: that of the checkpoint", ge=0, le=65_536)
    intermediate: Whole = setting(
        0, "width inside an expert; 0: that of the checkpoint", ge=0, le=65_536
    )
    layout: Layout = setting(
        "eplb",
        "tensors of an expert's record, by the code that computes with them: eplb's own kernels, "
        "or the experts modules of the transformers library",
    )
    precision: Precision = setting(
        "bfloat16",
        "of the expert weights; fp8 has block scales; layout transformers: as in the checkpoint",
    )


class Batch(Section):
    """What acts on each batch beside the placement; alike on every rank.

    The engine takes the parts from `BuiltRank.batch_parts`. [planning.md](planning.md) says what to
    choose where.
    """

    split: bool = setting(False, "choose replicas by the batch's own counts")
    shared_expert: SharedExpert = setting(
        "home", "where the shared expert of a token runs: on its own rank, or on a light one"
    )
    pulls: Whole = setting(
        0,
        "spare slots of each rank for just-in-time replicas; 0: none are pulled",
        unit="slots",
        ge=0,
        le=64,
    )
    pull_rows: Whole = setting(
        0,
        "rows whose product takes as long as the pull of a record; 0: a pull counts as free",
        unit="rows",
        ge=0,
        le=1_000_000,
    )
    exchange: CountExchange = setting(
        "group",
        "how ranks exchange the counts of a batch: over their process group, or through GPU memory "
        "that all of them map",
    )

    def switches(self) -> BatchSwitches:
        """Give them as ranks take them.

        Raises:
            ConfigError: a switch needs another one, or excludes it.
        """
        return BatchSwitches(**self.model_dump())


class TopologySettings(Section):
    """The ranks of a deployment, and the hosts that they run on. A node is a host here."""

    nodes: Whole = setting(1, "hosts", ge=1, le=256)
    ranks_per_node: Whole = setting(8, "ranks of each host", ge=1, le=256)
    slots_per_rank: Whole = setting(
        0, "expert slots of each rank and layer; 0: 1.25 times its share", ge=0, le=65_536
    )
    spare_slots: Whole = setting(0, "further slots of each rank, kept empty", ge=0, le=4096)
    staging_experts: Whole = setting(
        0,
        "entries of a rank's staging ring; 0: slots_per_rank, or none with spare slots",
        ge=0,
        le=65_536,
    )
    hosts: list[str] = setting([], "address of each host; empty: one host, 127.0.0.1")
    device: Literal["cpu", "cuda"] = setting("cuda", "where the ranks run")

    @field_validator("hosts")
    @classmethod
    def _every_host_has_an_address(cls, hosts: list[str], info: ValidationInfo) -> list[str]:
        nodes = info.data.get("nodes", 1)
        for host in hosts:
            try:
                ipaddress.ip_address(host)
            except ValueError as exc:
                raise ValueError(f"expected numeric addresses, found {host!r}") from exc
        if len(hosts) != nodes and (hosts or nodes > 1):
            raise ValueError(f"expected {nodes} addresses, one for each of topology.nodes")
        if len(set(hosts)) < len(hosts):
            raise ValueError("expected another address for each host")
        return hosts


class NetworkSettings(Section):
    """Ports, deadlines and the secret of a deployment.

    Ports are alike on every host. Each rank of a host has its own rank link: `rank_port` is that
    of the first. Both kinds of links listen only with `host_cache.other_hosts`.
    """

    interface: str | None = setting(
        None, "network interface of gloo and NCCL; none: the one with the host's address"
    )
    rendezvous_port: Whole = setting(
        29400, "where ranks meet, on the first host (MASTER_PORT)", ge=1, le=65_535
    )
    host_cache_port: Whole = setting(
        23718, "of a host cache, for other hosts", unit="", ge=1, le=65_535
    )
    rank_port: Whole = setting(23719, "of the first rank link of a host", ge=1, le=65_535)
    join_deadline_s: Number = setting(
        NetworkConfig.join_deadline_s, "for all ranks to meet", gt=0, le=HOUR_S
    )
    fill_deadline_s: Number = setting(
        NetworkConfig.fill_deadline_s, "for all ranks to load their experts", gt=0, le=HOUR_S
    )
    secret_file: Path | None = setting(
        None,
        "file with the secret of the deployment (or EPLB_SECRET); none: only loopback addresses",
    )
    tls_certificate_file: Path | None = setting(
        None, "certificate of this host, for links with TLS; none: links are not encrypted"
    )
    tls_key_file: Path | None = setting(None, "its key, without a passphrase")
    tls_ca_file: Path | None = setting(
        None, "authorities that certificates of other hosts are accepted by"
    )

    @property
    def tls(self) -> TlsFiles | None:
        """Files of links with TLS; None: they have none.

        Raises:
            ConfigError: one is not set.
        """
        names = "tls_certificate_file", "tls_key_file", "tls_ca_file"
        given = files_together(self, "network", *names)
        return TlsFiles(Certificate(*given[:2]), given[2]) if given else None
