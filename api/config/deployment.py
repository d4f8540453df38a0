"""Settings of a deployment itself: its model, ranks, hosts, ports and HTTP service.

What its components take is declared by them; ``api/config/tree.py`` puts all in one tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from api.config.certificate import Certificate
from eplb.declared import Setting, check_fields
from eplb.errors import ConfigError, UnfitSetting

Precision = Literal["float32", "bfloat16", "fp8"]
Layout = Literal["eplb", "transformers"]
EVERY = "*"  # stands for the names of all deployments


@dataclass(frozen=True)
class ModelSettings:
    """The model of a deployment: shapes, or a checkpoint whose ``config.json`` gives them."""

    checkpoint: Annotated[
        Path | None, Setting("folder of the weights; none: the engine loads them")
    ] = None
    layers: Annotated[int, Setting("MoE layers; 0: those of the checkpoint", at_most=1024)] = 0
    experts: Annotated[
        int, Setting("experts of each layer; 0: those of the checkpoint", at_most=65_536)
    ] = 0
    top_k: Annotated[
        int,
        Setting("experts that each token is routed to; 0: those of the checkpoint", at_most=256),
    ] = 0
    hidden: Annotated[
        int, Setting("width of a token; 0: that of the checkpoint", at_most=65_536)
    ] = 0
    intermediate: Annotated[
        int, Setting("width inside an expert; 0: that of the checkpoint", at_most=65_536)
    ] = 0
    layout: Annotated[
        Layout,
        Setting(
            "tensors of an expert's record, by the code that computes with them: eplb's own "
            "kernels, or the experts modules of the transformers library"
        ),
    ] = "eplb"
    precision: Annotated[
        Precision | None,
        Setting(
            "number format of the expert weights; fp8 has block scales; none: bfloat16, or with "
            "the layout transformers as in the checkpoint"
        ),
    ] = None


@dataclass(frozen=True)
class TopologySettings:
    """The ranks of a deployment, and the hosts that they run on."""

    nodes: Annotated[int, Setting("hosts", at_least=1, at_most=256)] = 1
    ranks_per_node: Annotated[int, Setting("ranks of each host", at_least=1, at_most=256)] = 8
    token_nodes: Annotated[
        int,
        Setting(
            "hosts, the first ones, whose ranks have tokens and no experts; the ranks of the "
            "others then have experts and no tokens; 0: every rank has both",
            at_most=255,
        ),
    ] = 0
    slots_per_rank: Annotated[
        int, Setting("expert slots of each rank and layer; 0: 1.25 times its share", at_most=65_536)
    ] = 0
    spare_slots: Annotated[int, Setting("further slots of each rank, kept empty", at_most=4096)] = 0
    staging_experts: Annotated[
        int,
        Setting(
            "entries of a rank's staging ring; 0: slots_per_rank, or none with spare slots",
            at_most=65_536,
        ),
    ] = 0
    hosts: Annotated[
        tuple[str, ...], Setting("address or name of each host; empty: all are this machine")
    ] = ()
    device: Annotated[Literal["cpu", "cuda"], Setting("where the ranks run")] = "cuda"

    def __post_init__(self) -> None:
        check_fields(self)
        hosts = list(self.hosts)
        if hosts and len(hosts) != self.nodes:
            expected = f"{self.nodes} addresses, one for each of topology.nodes"
            raise UnfitSetting("hosts", hosts, expected)
        if self.token_nodes >= self.nodes:
            raise UnfitSetting("token_nodes", self.token_nodes, "fewer than topology.nodes")
        if len(set(hosts)) < len(hosts):
            raise UnfitSetting("hosts", hosts, "another address for each host")


@dataclass(frozen=True)
class NetworkSettings:
    """Ports of a deployment."""

    rendezvous_port: Annotated[
        int,
        Setting("where ranks meet, on the first host (MASTER_PORT)", at_least=1, at_most=65_535),
    ] = 29400


@dataclass(frozen=True)
class RecordSources:
    """Where a host cache finds records beside the checkpoint."""

    record_file: Annotated[bool, Setting("keep expert records in a file beside the weights")] = (
        False
    )


@dataclass(frozen=True)
class HttpSettings:
    """The HTTP service. Its limits are constants (``HttpLimits``)."""

    host: Annotated[
        str,
        Setting(
            "address that the service listens on; one that is not loopback needs a secret",
            min_length=1,
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Setting("port; 0: any free one", at_most=65_535)] = 8765
    tls_certificate_file: Annotated[
        Path | None,
        Setting("certificate, with those up to its authority; none: http, without encryption"),
    ] = None
    tls_key_file: Annotated[
        Path | None, Setting("key of the certificate, without a passphrase")
    ] = None
    deployments: Annotated[
        str,
        Setting(
            "deployments of the store that `eplb serve` shows beside its own, as `a, b`; `*`: all; "
            "empty: none",
            max_length=5000,
        ),
    ] = ""
    metrics_level: Annotated[
        Literal["default", "layer", "rank"],
        Setting("series of /metrics for each layer, or each layer and rank"),
    ] = "default"
    metrics_host: Annotated[
        str,
        Setting(
            "address of `eplb serve` for /metrics alone, empty: none; not loopback: needs a secret"
        ),
    ] = ""
    metrics_port: Annotated[
        int, Setting("port of metrics_host; 0: any free one", at_most=65_535)
    ] = 8766

    @property
    def deployment_names(self) -> tuple[str, ...]:
        """Deployments that are shown beside the service's own; EVERY: all of the store."""
        return tuple(name for part in self.deployments.split(",") if (name := part.strip()))

    @property
    def certificate(self) -> Certificate | None:
        """The certificate of the service; None: it serves http.

        Raises:
            ConfigError: its key is not set, or the key without it.
        """
        chain, key = self.tls_certificate_file, self.tls_key_file
        if chain is not None and key is not None:
            return Certificate(chain.absolute(), key.absolute())
        if chain is key:
            return None
        missing, given = "tls_certificate_file", "tls_key_file"
        if key is None:
            missing, given = given, missing
        raise ConfigError(
            f"http.{missing} is not set and http.{given} is, expected both or none of them"
        )
