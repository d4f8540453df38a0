"""A deployment as its configuration describes it: what each of its commands starts from."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from api.config.deployment import RecordSources
from api.config.live import static_layer
from api.config.tree import Settings
from api.deploy.model import SHAPES, model_shape, record_schema
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.migration.build import Pace
from eplb.settings.deployment import is_loopback
from rebalance.assembly.config import NetworkConfig, RankConfig, ReportingConfig
from rebalance.controller.loop import ControllerSettings
from rebalance.protocol.journal import JOURNAL_FOLDER
from rebalance.weights.cache.address import HostCacheAddress, place_of_records
from rebalance.weights.link.secret import Secret, SecretSettings, deployment_secret
from telemetry import file_of, open_store
from telemetry.state.live import Value
from telemetry.state.store import StateStore, without_password
from telemetry.written_files import check_own

if TYPE_CHECKING:
    from rebalance.assembly.description import DeploymentDescription
    from rebalance.weights.cache.cache_settings import HostCacheSettings
    from runtime.experts import ExpertSchema

SPOOL_FOLDER = "spool"  # folder in the state folder
DEFAULT_REDUNDANCY = 1.25  # slots over experts where topology.slots_per_rank is 0


@dataclass(frozen=True)
class Deployment:
    """A deployment; what needs torch is made only when it is asked for."""

    settings: Settings
    secret: Secret
    hosts: tuple[str, ...]  # address of each

    @property
    def is_of_engine(self) -> bool:
        """Whether an engine has model and ranks, and its plug-in leads: the file has no model."""
        model = self.settings.model
        return model.checkpoint is None and not any(getattr(model, name) for name in SHAPES)

    @cached_property
    def model(self) -> ModelShape:
        """Of the file.

        Raises:
            ConfigError, CheckpointError: as ``model_shape``.
        """
        return model_shape(self.settings.model)

    @cached_property
    def topology(self) -> Topology:
        """Ranks and their slots, spare slots included.

        Raises:
            ConfigError, CheckpointError: as ``topology_of`` and ``model_shape``.
        """
        return topology_of(self.settings, self.model)

    @property
    def name(self) -> str:
        """In the store and on its hosts."""
        return self.settings.deployment.name

    @property
    def state_dir(self) -> Path:
        """The state folder of this host."""
        return self.settings.deployment.state_dir

    @property
    def store_url(self) -> str:
        """The URL of the store; it may hold a password."""
        return self.settings.deployment.store_url

    @property
    def store_shown(self) -> str:
        """The store without its password."""
        return without_password(self.store_url)

    @property
    def spare_slots(self) -> int:
        """Slots of each rank and layer that stay EMPTY."""
        return self.settings.topology.spare_slots

    @cached_property
    def schema(self) -> ExpertSchema:
        """What belongs to an expert's record; loads torch.

        Raises:
            CheckpointError: the checkpoint cannot be read, or has no such layout.
        """
        return record_schema(self.settings.model, self.model)

    @property
    def static(self) -> Mapping[str, Value]:
        """Live settings as its configuration has them, and the spare slots, which stay."""
        return {**static_layer(self.settings), "spare_slots": self.spare_slots}

    @property
    def pace(self) -> Pace:
        """How migrations move records: flip mode with spares, copy mode with staging without."""
        spares = self.spare_slots
        if spares:
            return Pace(staging_experts=0, mode="flip", spare_slots=spares)
        slots = int(self.topology.slots_of_rank.max())
        return Pace(staging_experts=self.settings.topology.staging_experts or slots)

    @property
    def serves_on(self) -> bool:
        """Whether survivors of a death serve on, where they can (``agent.serve_on``)."""
        return self._rank_config().serve_on

    @property
    def controller(self) -> ControllerSettings:
        """How its controller decides."""
        return self.settings.make(ControllerSettings, pace=self.pace)

    def host_cache_address(self, host: int) -> HostCacheAddress:
        """Where ranks of a host find its cache."""
        key = self.secret.derived(f"host cache {host}", 16)
        return HostCacheAddress(f"{self.name}-host{host}-{self.hosts[host]}", key)

    @property
    def host_cache(self) -> HostCacheSettings:
        """How each host keeps records; the record file lies beside the weights."""
        given, weights = self.settings, self.settings.model.checkpoint
        record_file = None
        if given[RecordSources].record_file and weights is not None:
            # Imported here: it loads torch, which a controller's process does without.
            from rebalance.weights.disk.record_file import record_file_beside

            record_file = record_file_beside(weights)
        return replace(given.host_cache, record_file=record_file)

    def opened_store(self) -> StateStore:
        """Open its store.

        Raises:
            StoreError: it cannot be used.
        """
        if (path := file_of(self.store_url)) is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open_store(self.store_url, self.name)

    def ranks_of(self, host: int) -> range:
        """The ranks of a host."""
        each = self.settings.topology.ranks_per_node
        return range(host * each, (host + 1) * each)

    def description(self) -> DeploymentDescription:
        """What every rank is given; loads torch."""
        from rebalance.assembly.description import DeploymentDescription

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
            records=place_of_records(self.name, self.secret),
        )

    def _rank_config(self) -> RankConfig:
        given, each = self.settings, self.settings.topology.ranks_per_node
        hosts = tuple(host for host in self.hosts for _ in range(each))
        state_dir = self.state_dir.resolve()
        return given.make(
            RankConfig,
            deployment=self.name,
            sample_steps=given.telemetry.sample_steps,
            staging_experts=self.pace.staging_experts,
            stage=given.staging.on(given.topology.device),
            network=replace(given[NetworkConfig], hosts=hosts),
            reporting=replace(
                given[ReportingConfig],
                spool_dir=given[ReportingConfig].spool_dir or state_dir / SPOOL_FOLDER,
            ),
            journal_dir=state_dir / JOURNAL_FOLDER,
        )


def address_of(host: str) -> str:
    """Look a host up; of several addresses the same one on every host that has the same names.

    Raises:
        OSError: the name is not known.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return min((family != socket.AF_INET, str(place[0])) for family, *_, place in found)[1]


def resolve(
    settings: Settings,
    environ: Mapping[str, str],
    secret: Secret | None = None,
    lookup: Callable[[str], str] = address_of,
    *,
    takes_engine: bool = False,
) -> Deployment:
    """Make a deployment of its configuration.

    Args:
        settings: all of its settings.
        environ: the process environment, for the secret.
        secret: in place of its own, which a host without one would make: for a look at another
            deployment.
        lookup: gives the address of a host by its name. Names are looked up here alone, because a
            rank that looked one up would have no deadline.
        takes_engine: whether a file without a model is that of an engine.

    Raises:
        ConfigError: settings that do not fit together, names of hosts that cannot be looked up, or
            a secret that cannot be used.
        CheckpointError: the checkpoint's folder cannot be read.
    """
    _ = settings.http.certificate  # refused where one of the files is not set
    # Without addresses all hosts are this machine.
    own = (f"127.0.0.{host + 1}" for host in range(settings.topology.nodes))
    hosts = _addresses(settings.topology.hosts, lookup) or tuple(own)
    is_remote = any(not is_loopback(host) for host in hosts)
    if is_remote and len(hosts) > 1 and (path := file_of(settings.deployment.store)) is not None:
        raise ConfigError(
            f"deployment.store is the file {path if settings.deployment.store else 'of a host'}, "
            f"expected a server that all {len(hosts)} hosts reach, as redis://HOST:PORT"
        )
    made = Deployment(settings, secret or secret_of(settings, environ), hosts)
    if not (takes_engine and made.is_of_engine):
        _ = made.topology  # refused here, before anything is written
    return made


def _addresses(hosts: Sequence[str], lookup: Callable[[str], str]) -> tuple[str, ...]:
    """Look up what ``topology.hosts`` names."""
    found, unknown = dict[str, str](), list[str]()
    for host in hosts:
        try:
            found[host] = lookup(host)
        except OSError as exc:
            unknown.append(f"{host} ({exc.strerror or exc})")
    if unknown:
        raise ConfigError(
            f"topology.hosts: no address of {', '.join(unknown)}, expected names that this host "
            "can look up, in /etc/hosts or DNS"
        )
    shown = ", ".join(f"{host} is {address}" for host, address in found.items())
    if len(set(found.values())) < len(found):
        raise ConfigError(f"topology.hosts: {shown}, expected another address for each host")
    is_remote = any(not is_loopback(address) for address in found.values())
    if is_remote and any(is_loopback(found[host]) and host != found[host] for host in found):
        raise ConfigError(
            f"topology.hosts: {shown}, expected no loopback address, which other hosts cannot "
            "reach: /etc/hosts of this host may have one for its own name"
        )
    return tuple(found.values())


def secret_of(settings: Settings, environ: Mapping[str, str], *, makes: bool = True) -> Secret:
    """Read the secret of a deployment.

    Raises:
        ConfigError: as ``deployment_secret``, or the state folder is not this user's.
    """
    check_own(settings.deployment.state_dir)
    http = settings.http
    addresses = {f"topology.hosts[{host}]": one for host, one in enumerate(settings.topology.hosts)}
    addresses["http.host"] = http.host
    if http.metrics_host:
        addresses["http.metrics_host"] = http.metrics_host
    return deployment_secret(
        settings[SecretSettings].secret_file,
        environ,
        addresses=addresses,
        state_dir=settings.deployment.state_dir,
        makes=makes,
    )


def topology_of(settings: Settings, model: ModelShape) -> Topology:
    """Give the ranks of a deployment and their slots.

    Raises:
        ConfigError: too few slots for the experts, or more than can be used.
    """
    given = settings.topology
    num_token_ranks = given.token_nodes * given.ranks_per_node
    num_ranks = given.nodes * given.ranks_per_node - num_token_ranks  # with experts
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
    whole = Topology.uniform(given.nodes, given.ranks_per_node, slots + given.spare_slots)
    of_rank = whole.slots_of_rank.copy()
    of_rank[:num_token_ranks] = 0
    return replace(whole, slots_of_rank=of_rank)


def host_here(deployment: Deployment, given: int | None) -> int:
    """Find which host of a deployment this machine is.

    Args:
        deployment: names an address for each host.
        given: the number that the command was given, if it was.

    Raises:
        ConfigError: the address of that host, or every host's, is none of this machine; or more
            than one is, and none was given.
    """
    hosts = deployment.hosts
    own = [host for host, address in enumerate(hosts) if is_own(address)]
    if given is None:
        if len(own) == 1:
            return own[0]
        found = "all of them are" if own else "none of them is"
        raise ConfigError(
            f"topology.hosts has {', '.join(hosts)}: {found} of this machine, "
            "expected one, or --host N"
        )
    if given >= len(hosts):
        raise ConfigError(f"--host is {given}, expected 0..{len(hosts) - 1} (topology.nodes)")
    if given not in own:
        raise ConfigError(
            f"host {given} has address {hosts[given]} (topology.hosts), which is none of this "
            "machine, expected one of its own"
        )
    return given


def is_own(address: str) -> bool:
    """Return whether this machine has an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as end:
        try:
            end.bind((address, 0))
        except OSError:
            return False
    return True
