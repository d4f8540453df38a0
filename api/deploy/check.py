"""``eplb check``: the configuration and this host, before anything is started; what ranks take.

Each check gives one finding: the component, what was found, and where that is wrong what was
expected. A check that fails hides no other.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from api.deploy.deployment import Deployment, is_own
from api.deploy.first_placement import CLOCK_EXPECTED, check_belongs, clock_offset, offset_text
from api.deploy.model import check_checkpoint, check_same_checkpoint
from api.monitor.verdict import CLOCK_TOLERANCE_S
from eplb.clock import Clock
from eplb.core.model import ModelShape
from eplb.errors import CheckpointError, ConfigError, EplbError, counted
from eplb.migration.serialisation import model_from_dict
from eplb.settings.deployment import numeric_address
from eplb.versions import CONTROLLER, RANKS, Announcement
from rebalance.assembly.places import holder_of
from rebalance.weights.link.secret import Secret
from telemetry.state.holder import is_here
from telemetry.state.joining import check_versions, claims_elsewhere, serving
from telemetry.state.store import StateStore
from telemetry.written_files import make_own_folder


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    component: str
    found: str
    expected: str = ""  # "": it is as it should be, or an error says all
    is_error: bool = False

    @property
    def is_ok(self) -> bool:
        """Whether nothing else was expected."""
        return not (self.expected or self.is_error)

    def __str__(self) -> str:
        if self.is_ok:
            return f"ok       {self.component}: {self.found}"
        expected = f", expected {self.expected}" if self.expected else ""
        return f"refused  {self.component}: {self.found}{expected}"


def as_finding(component: str, exc: EplbError) -> Finding:
    """Take an error apart, which names what was found and mostly what was expected."""
    found, _, expected = str(exc).removeprefix(f"{component}: ").partition(", expected ")
    return Finding(component, found, expected, is_error=True)


GIB = 2**30
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Costs:
    """Bytes of a deployment; every rank and every host takes the same."""

    record: int  # the record of one expert
    slots: int  # live slots of a rank in all layers, without spares
    spares: int  # slots of a rank that stay EMPTY between migrations
    staging: int  # the staging ring of a rank
    cache: int  # the cache of a host after every record was requested
    num_local_ranks: int
    device: str

    @property
    def rank(self) -> int:
        """Bytes of a rank on its device."""
        return self.slots + self.spares + self.staging

    @property
    def host(self) -> int:
        """Bytes of a host's memory."""
        of_ranks = self.rank * self.num_local_ranks if self.device == "cpu" else 0
        return self.cache + of_ranks

    @property
    def pinned(self) -> int:
        """Bytes of a host's memory that GPUs have registered, and that cannot be swapped."""
        return self.cache if self.device == "cuda" else 0


def costs_of(deployment: Deployment) -> Costs:
    """Count what a deployment takes; loads torch for the layout of a record.

    Raises:
        ConfigError: the host cache has no room for one record.
        CheckpointError: the checkpoint has no such layout.
    """
    given, model = deployment.settings, deployment.model
    record, layers = deployment.schema.record_bytes, model.num_layers
    slots = int(deployment.topology.slots_of_rank.max()) - deployment.spare_slots
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


def check_all(deployment: Deployment, host: int, clock: Clock = time.time) -> Iterator[Finding]:
    """Run every check for one host of a deployment."""
    count = deployment.topology.num_ranks
    yield Finding(
        "configuration",
        f"{deployment.name}: {count} ranks on {len(deployment.hosts)} hosts, this is host {host}, "
        f"{deployment.hosts[host]}",
    )
    whose = "of the deployment" if deployment.secret.is_given else "this host's own (loopback)"
    yield Finding("secret", f"{whose}, fingerprint {deployment.secret.fingerprint}")
    weights, certificate = deployment.settings.model, deployment.settings.http.certificate

    def valid(component: str, until: str) -> list[Finding]:
        return [Finding(component, f"the certificate is valid until {until}")] if until else []

    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("TLS of HTTP", lambda: valid("TLS of HTTP", certificate.check() if certificate else "")),
        ("ports", lambda: check_ports(deployment, host)),
        ("places", lambda: check_places(deployment, host)),
        ("state folder", lambda: [check_state_folder(deployment.state_dir)]),
        (
            "checkpoint",
            lambda: [Finding("checkpoint", check_checkpoint(weights, deployment.model))],
        ),
        ("serve on", lambda: check_serve_on(deployment)),
        ("memory", lambda: check_costs(costs_of(deployment))),
        ("store", lambda: check_store(deployment, host, clock)),
    ]
    for component, check in checks:
        try:
            yield from check()
        except EplbError as exc:
            yield as_finding(component, exc)


def ports_of(deployment: Deployment, host: int) -> Iterator[tuple[str, str, int]]:
    """Give what will listen on a host: its setting, address and port."""
    network, http = deployment.settings.network, deployment.settings.http
    address = deployment.hosts[host]
    if host == 0:
        yield "network.rendezvous_port", address, network.rendezvous_port
    if http.port and is_own(numeric_address(http.host)):
        yield "http.port", numeric_address(http.host), http.port
    if http.metrics_host and http.metrics_port:
        own = numeric_address(http.metrics_host, "http.metrics_host")
        if is_own(own):
            yield "http.metrics_port", own, http.metrics_port


def check_ports(deployment: Deployment, host: int) -> Iterator[Finding]:
    """Find ports that two settings share, or that processes of others use."""
    free, taken = [], dict[tuple[str, int], str]()
    for setting, address, port in ports_of(deployment, host):
        place = f"{port} of {address} ({setting})"
        if (address, port) in taken:
            other = taken[address, port]
            yield Finding("ports", f"{place} is also {other}", "another port for each")
            continue
        taken[address, port] = setting
        if not (refusal := port_refusal(address, port)):
            free.append(str(port))
        elif pid := _listener_of(port, _own_processes(deployment, host)):
            yield Finding("ports", f"{place} is used by process {pid} of this deployment")
        else:
            yield Finding("ports", f"{place} cannot be used: {refusal}", "a free port")
    if free or not taken:
        yield Finding("ports", f"free: {', '.join(free) or 'none needed'}")


def _own_processes(deployment: Deployment, host: int) -> Iterator[int]:
    """Processes of a deployment that run on this host: its ranks, and those that report here."""
    yield from (pid for _, pid in running_ranks(deployment, host))
    try:
        with closing(deployment.opened_store()) as store:
            names = [one.process for one in store.announced()]
    except EplbError:  # the check of the store says it
        return
    for name in names:
        if is_here(name):
            yield int(name.split(":")[-2])  # telemetry/state/holder.py has the form


LISTENS = "0A"  # TCP_LISTEN, as /proc/net/tcp has it (proc_net_tcp(5))


def _listener_of(port: int, processes: Iterable[int]) -> int | None:
    """The first of some processes that listens on a port; None: none of them does."""
    listening = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == LISTENS and int(local.rpartition(":")[2], 16) == port:
                    listening.add(f"socket:[{inode}]")
    for pid in processes:
        with suppress(OSError):  # it has ended, or is another user's
            for one in Path(f"/proc/{pid}/fd").iterdir():
                if str(one.readlink()) in listening:
                    return pid
    return None


def port_refusal(address: str, port: int) -> str:
    """Return why a port cannot be listened on; "": it can."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, port), family=family).close()
    except OSError as exc:
        return os.strerror(exc.errno) if exc.errno else str(exc)
    except OverflowError as exc:
        return str(exc)
    return ""


def running_ranks(deployment: Deployment, host: int) -> Iterator[tuple[int, int]]:
    """Give the ranks of a host that run there already, with their processes."""
    for rank in deployment.ranks_of(host):
        if (pid := holder_of(deployment.name, rank, deployment.hosts[host])) is not None:
            yield rank, pid


def check_places(deployment: Deployment, host: int) -> Iterator[Finding]:
    """Find ranks and a host cache of this deployment that run on this host already."""
    ranks = deployment.ranks_of(host)
    for rank, pid in running_ranks(deployment, host):
        yield Finding("places", f"rank {rank} is run by process {pid}", "no process")
    with socket.socket(socket.AF_UNIX) as end:
        try:
            end.bind(deployment.host_cache_address(host).socket)
        except OSError:
            yield Finding("places", f"a process is the cache of host {host}", "no process")
            return
    yield Finding("places", f"ranks {ranks[0]}..{ranks[-1]} and the host cache are not running")


def check_state_folder(path: Path) -> Finding:
    """Find out whether journals and spools can be written."""
    try:
        make_own_folder(path)
        probe = path / f"check.{os.getpid()}.unfinished"
        probe.touch()
        probe.unlink()
    except OSError as exc:
        found = f"{path} cannot be written: {exc.strerror}"
        return Finding("state folder", found, "a folder of this user (deployment.state_dir)")
    return Finding("state folder", f"{path} can be written")


def check_serve_on(deployment: Deployment) -> Iterator[Finding]:
    """Say whether survivors of a death have slots for all experts, and whether the dead come back.

    Nothing where ``agent.serve_on`` is off: all ranks start again after each death.
    """
    if not deployment.serves_on:
        return
    topology, experts = deployment.topology, deployment.model.num_experts
    slots = topology.slots_of_rank[topology.slots_of_rank > 0]  # all alike, spares included
    least = math.ceil(experts / slots[0])  # ranks that hold every expert
    if len(slots) == least:
        left = (least - 1) * slots[0]
        more = math.ceil(experts / (least - 1)) - deployment.spare_slots if least > 1 else 0
        enough = f"topology.slots_per_rank = {more} or more, or " if more else "two ranks, or "
        yield Finding(
            "serve on",
            f"after the death of any rank {left} slots of a layer are left for {experts} experts, "
            "so that all ranks start again",
            f"{enough}agent.serve_on = false",
        )
    else:
        deaths = len(slots) - least
        yield Finding(
            "serve on",
            f"{deaths} of {counted(len(slots), 'rank')} may die: the others have "
            f"{least * slots[0]} slots of a layer for {experts} experts",
        )
    if deployment.settings.model.checkpoint is None:
        yield Finding(
            "serve on",
            "without model.checkpoint a rank that died cannot join again: it comes back once all "
            "ranks are started",
        )


def check_costs(costs: Costs) -> Iterator[Finding]:
    """Compare what a deployment takes with this host's memory and GPUs."""
    yield check_memory(costs, available_memory())
    if costs.device == "cuda":
        yield from check_gpu_host(costs)


def check_memory(costs: Costs, available: int) -> Finding:
    """Compare what a host needs with what it has."""
    found = f"{amount(available)} of host memory are available, {amount(costs.host)} are needed"
    if available < costs.host:
        return Finding("memory", found, "more memory, or fewer host_cache.records")
    return Finding("memory", found)


def check_store(
    deployment: Deployment, host: int = 0, clock: Clock = time.time
) -> Iterator[Finding]:
    """Find out whether the store answers, is of this deployment, and has this host's time."""
    try:
        with closing(deployment.opened_store()) as store:
            versions = check_versions_here(store)
            if not versions.is_ok:  # nothing else of the store can be relied on
                yield versions
                return
            check_belongs(store, deployment)
            try:
                check_same_checkpoint(store, deployment.settings.model)
            except CheckpointError as exc:
                yield as_finding("checkpoint", exc)
            for found in claims_elsewhere(store, host):
                expected = "no process, or one of this machine: two have the address of this host"
                yield Finding("places", found, f"{expected} (topology.hosts)")
            committed = store.committed()
            # The event also shows that the store can be written.
            detail = {"host": socket.gethostname(), "process": os.getpid()}
            offset_s, error_s = clock_offset(store, "check", detail, clock)
    except EplbError as exc:
        yield as_finding("store", exc)
        return
    held = f"generation {committed.placement.generation}" if committed else "no placement yet"
    yield Finding("store", f"{deployment.store_shown} can be written, holds {held}")
    is_off = abs(offset_s) > CLOCK_TOLERANCE_S + error_s
    yield Finding("clock", offset_text(offset_s), CLOCK_EXPECTED if is_off else "")
    yield versions


def check_versions_here(store: StateStore) -> Finding:
    """Compare this release with the processes of the deployment that serve."""
    own = Announcement(RANKS, "")
    try:
        # A controller meets all that serves, so that one wait is enough.
        check_versions(store, Announcement(CONTROLLER, ""))
        check_versions(store, own, wait_s=0.0)
    except ConfigError as exc:
        return as_finding("versions", exc)
    found = serving(store, store.backend.now())
    shown = "".join(f", {one.component} of {one.version} serve" for one in found)
    return Finding("versions", f"this is {own.version}{shown or ', nothing serves'}")


def check_gpu_host(costs: Costs) -> Iterator[Finding]:
    """Check the GPUs of this host, which ranks get in order."""
    import torch  # late, as below: it takes seconds

    from runtime.dispatch.deepep import load_deep_ep

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
    import torch

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
    import torch

    free, total = torch.cuda.mem_get_info(gpu)
    left = free - costs.rank
    found = (
        f"{amount(costs.rank)} of {amount(total)} for experts, {amount(max(left, 0))} of what is "
        "free now left for the other weights and the KV cache"
    )
    if left < 0:
        return Finding(f"GPU {gpu}", f"{amount(free)} free", f"{amount(costs.rank)} for experts")
    return Finding(f"GPU {gpu}", found)


def check_profiles(
    mine: Deployment, host: int, others: Mapping[str, Callable[[Secret], Deployment]]
) -> Iterator[Finding]:
    """Compare a deployment with those of the other profiles of its file.

    Args:
        mine: the deployment that is checked.
        host: number of this host in it.
        others: by profile; each is made of its configuration here, with the secret of ``mine``, so
            that what is wrong with one is a finding and nothing of it is written.
    """
    for profile, resolve in others.items():
        try:
            other = resolve(mine.secret)
            clashes = list(_ports_of_both(mine, other, host))
            found = _served_by(other, mine)
        except EplbError as exc:
            yield as_finding(f"profile {profile}", exc)
            continue
        for clash in clashes:
            yield Finding(f"profile {profile}", clash, "another port for each profile of a host")
        about = f"{other.name}, {other.topology.num_ranks} ranks, {found}"
        yield Finding(f"profile {profile}", about)


def _ports_of_both(mine: Deployment, other: Deployment, host: int) -> Iterator[str]:
    """What both deployments would listen on at one host; loopback ports are of each host."""
    if mine.hosts[host] not in other.hosts:
        return
    own = {(address, port): setting for setting, address, port in ports_of(mine, host)}
    for setting, address, port in ports_of(other, other.hosts.index(mine.hosts[host])):
        if found := own.get((address, port)):
            yield f"{port} of {address} ({setting}) is also {found} of {mine.name}"


def _served_by(other: Deployment, mine: Deployment) -> str:
    """What a profile's deployment serves, if it has started.

    Raises:
        EplbError: another model or checkpoint than this host's, or the store cannot be read.
    """
    with closing(other.opened_store()) as store:
        run = store.current_run()
        check_same_checkpoint(store, mine.settings.model)
        if run is None:
            return "not started yet"
        found, expected = model_from_dict(dict(run.model)), mine.model
        if _shape(found) != _shape(expected):
            raise ConfigError(
                f"deployment {other.name!r} serves {found.num_layers} MoE layers of "
                f"{found.num_experts} experts, top {found.top_k}, expected the model of "
                f"{mine.name!r}: {expected.num_layers} layers of {expected.num_experts} experts, "
                f"top {expected.top_k}"
            )
    return f"run {run.run} serves the same model"


def _shape(model: ModelShape) -> tuple[int, int, int]:
    return model.num_layers, model.num_experts, model.top_k
