"""A deployment as its configuration describes it: what each of its commands starts from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from api.config.addresses import is_loopback
from api.config.components import (
    controller_settings,
    host_cache_settings,
    pace_of,
    reporting,
)
from api.config.fields import values_of
from api.config.live import static_layer
from api.config.tree import Settings
from api.demo.settings import DEFAULT_REDUNDANCY
from api.demo.state_dir import STORE_FILE
from api.deploy.checkpoint import ServedCheckpoint
from api.deploy.model import model_shape, record_schema
from api.deploy.secret import Secret, deployment_secret
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.migration.build import Pace
from rebalance.build.config import NetworkConfig, RankConfig
from rebalance.controller.loop import ControllerSettings
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.link.host_link_settings import HostLinkSettings
from rebalance.weights.link.rank_link_settings import RankLinkSettings
from telemetry import file_of, open_store
from telemetry.state.live import LiveSettings
from telemetry.state.store import StateStore, without_password

if TYPE_CHECKING:
    from rebalance.build.description import DeploymentDescription
    from rebalance.weights.cache.cache_settings import HostCacheSettings
    from runtime.experts import ExpertSchema

LOOPBACK = "127.0.0.1"
JOURNAL_FOLDER = "journal"  # in the state folder


@dataclass(frozen=True)
class Deployment:
    """A deployment; what needs torch is made only when it is asked for."""

    settings: Settings
    secret: Secret
    hosts: tuple[str, ...]  # address of each
    model: ModelShape
    topology: Topology  # spare slots included

    @property
    def name(self) -> str:
        """In the store and on its hosts."""
        return self.settings.deployment.name

    @property
    def state_dir(self) -> Path:
        """Of this host."""
        return self.settings.deployment.state_dir

    @property
    def store_url(self) -> str:
        """Of the store; may hold a password."""
        return self.settings.deployment.store or str(self.state_dir / STORE_FILE)

    @property
    def store_shown(self) -> str:
        """The store without its password."""
        return without_password(self.store_url)

    @property
    def spare_slots(self) -> int:
        """Slots of each rank and layer that stay EMPTY."""
        return self.settings.topology.spare_slots

    @property
    def checkpoint(self) -> ServedCheckpoint | None:
        """Its weights on this host; None: the engine has them."""
        given = self.settings.model
        if given.checkpoint is None:
            return None
        return ServedCheckpoint(given.checkpoint, given.layout)

    @cached_property
    def schema(self) -> ExpertSchema:
        """What belongs to an expert's record; loads torch.

        Raises:
            CheckpointError: the checkpoint cannot be read, or has no such layout.
        """
        return record_schema(self.settings.model, self.model)

    @property
    def static(self) -> LiveSettings:
        """Live settings as its configuration has them."""
        return static_layer(self.settings)

    @property
    def pace(self) -> Pace:
        """How much of a migration is staged at a time."""
        spares = self.spare_slots
        working = int(self.topology.slots_of_rank[0]) - spares
        return pace_of(self.settings.topology.staging_experts or working, spares)

    @property
    def controller(self) -> ControllerSettings:
        """How its controller decides."""
        return controller_settings(self.settings, self.pace)

    @property
    def has_links(self) -> bool:
        """Whether caches and ranks of different hosts give each other records."""
        return self.settings.host_cache.other_hosts != "off"

    @cached_property
    def host_links(self) -> HostLinkSettings | None:
        """Where host caches listen for each other."""
        order = self.settings.host_cache.other_hosts
        if order == "off":
            return None
        port = self.settings.network.host_cache_port
        return HostLinkSettings(
            tuple((host, port) for host in self.hosts),
            self.secret.derived("links between host caches"),
            order=order,
            tls=self.settings.network.tls,
            **values_of(self.settings.host_link),
        )

    @cached_property
    def rank_links(self) -> RankLinkSettings | None:
        """Where ranks listen for ranks of other hosts."""
        if not self.has_links:
            return None
        each, first = self.settings.topology.ranks_per_node, self.settings.network.rank_port
        addresses = tuple((host, first + local) for host in self.hosts for local in range(each))
        key = self.secret.derived("links between ranks")
        tls = self.settings.network.tls
        return RankLinkSettings(addresses, key, tls=tls, **values_of(self.settings.transport))

    def host_cache_address(self, host: int) -> HostCacheAddress:
        """Where ranks of a host find its cache."""
        key = self.secret.derived(f"host cache {host}", 16)
        return HostCacheAddress(f"{self.name}-host{host}", key)

    def host_cache(self, record_bytes: int) -> HostCacheSettings:
        """How each host keeps records."""
        weights = self.settings.model.checkpoint
        return host_cache_settings(self.settings, weights, record_bytes, self.host_links)

    def opened_store(self) -> StateStore:
        """Open its store.

        Raises:
            StoreError: it cannot be used.
        """
        if (path := file_of(self.store_url)) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        return open_store(self.store_url, self.name)

    def ranks_of(self, host: int) -> range:
        """The ranks of a host."""
        each = self.settings.topology.ranks_per_node
        return range(host * each, (host + 1) * each)

    def description(self) -> DeploymentDescription:
        """What every rank is given; loads torch."""
        from rebalance.build.description import DeploymentDescription

        given, file = self.settings, file_of(self.store_url)
        return DeploymentDescription(
            config=self._rank_config(),
            store=self.store_url if file is None else str(file.resolve()),
            model=self.model,
            schema=self.schema,
            topology=self.topology,
            device=given.topology.device,
            hosts=self.hosts,
            host_caches=tuple(map(self.host_cache_address, range(len(self.hosts)))),
            join_key=self.secret.derived("join of ranks"),
            window_steps=given.telemetry.window_steps,
            window_seconds=given.telemetry.window_seconds,
            checkpoint=given.model.checkpoint and given.model.checkpoint.resolve(),
        )

    def _rank_config(self) -> RankConfig:
        given, agent = self.settings, self.settings.agent
        each = given.topology.ranks_per_node
        network = NetworkConfig(
            given.network.interface,
            tuple(host for host in self.hosts for _ in range(each)),
            given.network.join_deadline_s,
            given.network.fill_deadline_s,
        )
        config = RankConfig(
            self.name,
            sample_steps=given.telemetry.sample_steps,
            staging_experts=self.pace.staging_experts,
            vote_every=agent.vote_every,
            vote_deadline_s=agent.vote_deadline_s,
            plan_deadline_s=agent.plan_deadline_s,
            scrub_every_steps=agent.scrub_every_steps,
            network=network,
            batch=given.batch.switches(),
            rank_links=self.rank_links,
            reporting=reporting(given, self.state_dir.resolve()),
            journal_dir=self.state_dir.resolve() / JOURNAL_FOLDER,
        )
        stage = given.staging.applied_to(config.stage_on(given.topology.device))
        return replace(config, stage=stage)


def resolve(
    settings: Settings, environ: Mapping[str, str], secret: Secret | None = None
) -> Deployment:
    """Make a deployment of its configuration.

    Args:
        settings: all of its settings.
        environ: the process environment, for the secret.
        secret: in place of its own, which a host without one would make: for a look at another
            deployment.

    Raises:
        ConfigError: settings that do not fit together, or a secret that cannot be used.
        CheckpointError: the checkpoint's folder cannot be read.
    """
    # Refused here where one of their files is not set, or switches exclude each other.
    _ = settings.network.tls, settings.http.certificate, settings.batch.switches()
    hosts = tuple(settings.topology.hosts) or (LOOPBACK,)
    is_remote = any(not is_loopback(host) for host in hosts)
    if is_remote and len(hosts) > 1 and (path := file_of(settings.deployment.store)) is not None:
        raise ConfigError(
            f"deployment.store is the file {path if settings.deployment.store else 'of a host'}, "
            f"expected a server that all {len(hosts)} hosts reach, as redis://HOST:PORT"
        )
    model = model_shape(settings.model)
    topology = _topology(settings, model)
    telemetry = settings.telemetry
    if telemetry.window_steps % telemetry.sample_steps:
        raise ConfigError(
            f"telemetry.sample_steps is {telemetry.sample_steps}, expected a divisor of "
            f"telemetry.window_steps, {telemetry.window_steps}"
        )
    return Deployment(settings, secret or secret_of(settings, environ), hosts, model, topology)


def secret_of(settings: Settings, environ: Mapping[str, str], *, makes: bool = True) -> Secret:
    """Read the secret of a deployment.

    Raises:
        ConfigError: as ``deployment_secret``.
    """
    http = settings.http
    addresses = {f"topology.hosts[{host}]": one for host, one in enumerate(settings.topology.hosts)}
    addresses["http.host"] = http.host
    if http.metrics_host:
        addresses["http.metrics_host"] = http.metrics_host
    return deployment_secret(
        settings.network.secret_file,
        environ,
        addresses=addresses,
        state_dir=settings.deployment.state_dir,
        makes=makes,
    )


def _topology(settings: Settings, model: ModelShape) -> Topology:
    given = settings.topology
    num_ranks = given.nodes * given.ranks_per_node
    least = math.ceil(model.num_experts / num_ranks)
    slots = given.slots_per_rank
    if not slots:
        wanted = DEFAULT_REDUNDANCY * model.num_experts / num_ranks
        slots = min(math.ceil(wanted), model.num_experts)
    if not least <= slots <= model.num_experts:
        raise ConfigError(
            f"topology.slots_per_rank is {slots}, expected {least} to {model.num_experts}: "
            f"{num_ranks} ranks hold {model.num_experts} experts, each at most once"
        )
    return Topology.uniform(given.nodes, given.ranks_per_node, slots + given.spare_slots)
