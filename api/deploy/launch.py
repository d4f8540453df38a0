"""``eplb launch -- CMD``: the ranks of one host, started as torchrun does, restarted after deaths.

    launcher of host 0 -- ranks 0..3 --+
                                       +-- meet, form a group, serve, end at one step
    launcher of host 1 -- ranks 4..7 --+

Launchers do not communicate. When a rank dies, the ranks of all hosts end (BrokenGroup), each
launcher starts its own again, and they meet anew; with ``agent.serve_on`` the others serve on, and
only the dead rank is started, to join them. Started by torchrun, once for each rank, the
command takes that rank's place and becomes CMD.

``--module`` imports a Python program once and forks the ranks: an import of torch takes a second of
a core, which eight ranks on two cores would wait for at each start. The import of the module must
start no thread and use no GPU.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from api.deploy.check import port_refusal, ports_of, running_ranks
from api.deploy.deployment import Deployment
from api.deploy.first_placement import ensure_first_placement
from api.deploy.local_ranks import LocalRanks
from api.deploy.waits import Reread, StartFiles, WaitReports, has_served
from api.interrupts import StopSignals
from api.processes.commands import NOTIFY_VARIABLE, REFUSED, Notifier, once_reached, settle
from api.processes.supervision import Restarts, SupervisionSettings
from eplb.core.placement import EMPTY, Placement
from eplb.errors import CheckpointError, ConfigError, RankError, StoreError
from eplb.migration.recovery import start_of
from eplb.migration.serialisation import topology_from_dict
from eplb.migration.survivors import survive
from eplb.versions import LAUNCHER, RANKS, Announcement
from rebalance.assembly.description import RANK_FILE_VARIABLE
from rebalance.assembly.places import JOINS_VARIABLE, MEMBERS_VARIABLE
from telemetry.state.events import FAILED, OF_RANKS, STOPPED, WAITING, Failure, OfHost
from telemetry.state.joining import Heartbeat, check_alone, check_versions, serving_ranks
from telemetry.state.store import StateStore

LOOK_S = 1.0  # interval of looks at which ranks should serve, while one does not run
# What a rank needs none of: the secret itself, a store's password, the launcher's supervisor.
NOT_FOR_RANKS = ("EPLB_SECRET", "EPLB_STORE", "EPLB_DEPLOYMENT__STORE", NOTIFY_VARIABLE)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """What a launcher starts."""

    deployment: Deployment
    host: int
    command: Sequence[str]  # the program of a rank; the arguments of ``module`` where there is one
    environ: Mapping[str, str]
    module: str | None = None
    reread: Reread | None = None  # None: what it refused is refused for good

    @property
    def ranks(self) -> range:
        """The ranks of this host."""
        return self.deployment.ranks_of(self.host)

    def imported(self) -> Callable[[], None] | None:
        """Import the program of a module; None: it is a command.

        Raises:
            ConfigError: it cannot be imported, or has no function ``main``.
        """
        if self.module is None:
            return None
        sys.path.append(str(Path.cwd()))  # where python -m finds a module too
        try:
            main: Callable[[], None] = importlib.import_module(self.module).main
        except (ImportError, AttributeError) as exc:
            raise ConfigError(
                f"--module {self.module} cannot be used: {exc}, expected a module with main()"
            ) from exc
        return main

    def start_files(self) -> StartFiles:
        """What a start depends on, as it is now."""
        return (self.reread or Reread(None, lambda: self.deployment)).files_of(self.deployment)

    def note(self, kind: str, message: str) -> None:
        """Store an event about the ranks of this host."""
        try:
            with closing(self.deployment.opened_store()) as store:
                store.add_event(kind, OfHost(self.host, message))
        except StoreError as exc:
            log.debug("event not stored: %s", exc)

    def environment(
        self, rank_file: str, rank: int, members: Sequence[int], *, joins: bool = False
    ) -> dict[str, str]:
        """The environment of one rank.

        Args:
            rank_file: which ranks are given.
            rank: this one.
            members: ranks that start together.
            joins: whether it joins others that serve.
        """
        topology, network = self.deployment.settings.topology, self.deployment.settings.network
        passed = {name: text for name, text in self.environ.items() if name not in NOT_FOR_RANKS}
        if len(members) < self.deployment.topology.num_ranks:
            passed[MEMBERS_VARIABLE] = ",".join(map(str, members))
        if joins:
            passed[JOINS_VARIABLE] = "1"
        lowest_host = int(self.deployment.topology.host_of_rank[members[0]])
        return passed | {
            RANK_FILE_VARIABLE: rank_file,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - self.ranks[0]),
            "WORLD_SIZE": str(self.deployment.topology.num_ranks),
            "LOCAL_WORLD_SIZE": str(len(self.ranks)),
            "GROUP_RANK": str(self.host),
            "GROUP_WORLD_SIZE": str(topology.nodes),
            "MASTER_ADDR": self.deployment.hosts[lowest_host],
            "MASTER_PORT": str(network.rendezvous_port),
        }


def check_start(launch: Launch) -> None:
    """Refuse what would keep the ranks of this host from starting.

    Raises:
        ConfigError: no such program, too few GPUs, a port that is in use, or a certificate that
            cannot be used.
        RankError: a rank's place is taken.
    """
    _check_host(launch)
    for rank, holder in running_ranks(launch.deployment, launch.host):
        raise RankError(
            f"rank {rank} of deployment {launch.deployment.name!r} is run by process {holder} "
            "of this host, expected none"
        )
    for setting, address, port in ports_of(launch.deployment, launch.host):
        if setting == "network.rendezvous_port" and (refusal := port_refusal(address, port)):
            raise ConfigError(
                f"{port} of {address} ({setting}) cannot be used: {refusal}, expected a free port"
            )


def _check_host(launch: Launch) -> None:
    """Refuse a program that is not there, and too few GPUs."""
    if launch.module is None and shutil.which(launch.command[0]) is None:
        raise ConfigError(
            f"{launch.command[0]} cannot be started: found no such program, expected one"
        )
    if launch.deployment.settings.topology.device == "cuda":
        check_gpus(len(launch.ranks))


def check_gpus(num_ranks: int) -> None:
    """Refuse a start on too few GPUs at once, and not by ranks that wait for each other.

    Raises:
        ConfigError: fewer GPUs are visible than one for each rank of this host.
    """
    import torch  # takes seconds: only where GPUs are asked for

    found = torch.cuda.device_count()
    if found < num_ranks:
        raise ConfigError(
            f"device cuda: found {found} GPUs for {num_ranks} ranks of this host, "
            "expected one for each"
        )


@dataclass(frozen=True)
class Prepared:
    """What ranks start from."""

    generation: int
    did: str  # a sentence about it
    members: tuple[int, ...]  # ranks that should serve
    joins: bool  # whether others serve already without the ranks of this host


def prepare_store(
    launch: Launch,
    lost_after: int | None = None,
    died: str = "",
    mine: Announcement | None = None,
) -> Prepared:
    """Have the store name a placement that the ranks can start from.

    Args:
        launch: what is started.
        lost_after: the generation that served last, if it is known.
        died: how the ranks before ended, for the history.
        mine: of the launcher, which is refused where another machine has one of this host.
    """
    with closing(launch.deployment.opened_store()) as store:
        check_versions(store, Announcement(RANKS, ""))
        if mine is not None:
            check_alone(store, mine)
        by = f"eplb launch, host {launch.host}"
        placement, did = ensure_first_placement(
            store, launch.deployment, by, lost_after=lost_after, is_of_ranks=True
        )
        members, joins = ranks_to_start(store, launch)
        if not joins:
            placement = placement_of_members(store, launch, placement, members)
        if died:
            message = f"{died}; restarting the ranks of host {launch.host}"
            store.add_event(FAILED, Failure(OF_RANKS, message, others_serve=joins))
    where = launch.deployment.store_shown
    did = f"{did}, generation {placement.generation}, in {where}"
    return Prepared(placement.generation, did, members, joins)


def ranks_to_start(store: StateStore, launch: Launch) -> tuple[tuple[int, ...], bool]:
    """Ranks that should serve, and whether others serve already without the ranks of this host."""
    found, run = store.wanted_ranks(), store.current_run()
    wanted = tuple(range(launch.deployment.topology.num_ranks)) if found is None else found
    if run is None or not launch.deployment.serves_on:
        return wanted, False
    alive = topology_from_dict(dict(run.topology)).alive
    is_served = bool(serving_ranks(store, store.backend.now()))
    return wanted, is_served and not alive[launch.ranks].any()


def placement_of_members(
    store: StateStore, launch: Launch, placement: Placement, members: Sequence[int]
) -> Placement:
    """Commit a placement that only the ranks hold that start; none where it is so already.

    Raises:
        PlacementError: they have too few slots.
        StoreError: the store failed, or another launcher has committed another placement.
    """
    topology = launch.deployment.topology
    others = sorted(set(range(topology.num_ranks)) - set(members))
    held = placement.slot_to_expert[:, np.isin(topology.rank_of_slot, others)]
    if (held == EMPTY).all():
        return placement
    target = survive(placement, topology, others).target
    reason = f"ranks {list(members)} start without ranks {others}"
    store.commit(target, expected=placement.generation, reason=reason)
    return target


def write_rank_file(deployment: Deployment, *, is_inherited: bool = False) -> str:
    """Write what ranks are given into a memory file of this process; returns its path.

    It holds keys, so it is on no disk, and for this user alone.
    """
    flags = 0 if is_inherited else os.MFD_CLOEXEC
    descriptor = os.memfd_create("eplb-rank-file", flags)
    os.fchmod(descriptor, 0o600)
    with os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as file:
        file.write(deployment.description().to_json())
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def check_torchrun(launch: Launch) -> None:
    """Refuse a rank that torchrun started in another way than the configuration has it.

    Raises:
        ConfigError: torchrun starts another number of ranks, the command is not there, there are
            too few GPUs, or a certificate cannot be used.
    """
    _check_host(launch)
    environ, expected = launch.environ, launch.deployment.topology.num_ranks
    found, rank = environ.get("WORLD_SIZE", ""), environ["RANK"]
    if found != str(expected):
        raise ConfigError(
            f"torchrun starts {found or 'no'} ranks (WORLD_SIZE), expected {expected} by "
            "topology.nodes and topology.ranks_per_node"
        )
    if not rank.isdecimal() or int(rank) not in launch.ranks:
        raise ConfigError(
            f"torchrun started rank {rank} on host {launch.host}, expected one of "
            f"{launch.ranks[0]}..{launch.ranks[-1]}"
        )


def become_rank(launch: Launch) -> None:
    """Under torchrun: become the command, as the rank that torchrun started.

    Raises:
        ConfigError: the command cannot be started.
    """
    passed = {name: text for name, text in launch.environ.items() if name not in NOT_FOR_RANKS}
    rank_file = write_rank_file(launch.deployment, is_inherited=True)
    try:
        os.execvpe(
            launch.command[0], list(launch.command), passed | {RANK_FILE_VARIABLE: rank_file}
        )
    except OSError as exc:
        raise ConfigError(f"{launch.command[0]} cannot be started: {exc.strerror}") from exc


class ExcludedRanks:
    """Looks for the ranks that the survivors of a death have excluded, over one store.

    It is asked every two seconds: a store of its own for each look would leave tens of kB behind
    until Python collects them.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._store: StateStore | None = None

    def look(self, run: str) -> frozenset[int] | None:
        """Those ranks of this host that are excluded from a run; None: nothing is on record."""
        try:
            self._store = self._store or self._launch.deployment.opened_store()
            record = self._store.recovery()
        except StoreError as exc:
            log.debug("excluded ranks are not known: %s", exc)
            return None
        if record is None or start_of(record.run) != start_of(run):
            return None
        return frozenset(self._launch.ranks) - frozenset(record.survivors)

    def close(self) -> None:
        """Close the store, for good or for a fork."""
        if self._store is not None:
            self._store.close()
        self._store = None


class Rejoins:
    """Which ranks of a host are started while others serve: those that should serve and do not run.

    Args:
        launch: what is started.
        supervision: delays of restarts, and the budget of each rank.
    """

    def __init__(self, launch: Launch, supervision: SupervisionSettings) -> None:
        self._launch = launch
        self._serves_on = launch.deployment.serves_on
        self._restarts = {
            rank: Restarts(supervision.restart_after_death, supervision) for rank in launch.ranks
        }
        self._started: dict[int, float] = {}
        self._files: dict[int, StartFiles] = {}  # of ranks that were started, by rank
        self._due: dict[int, float] = {}
        self._look_at = 0.0

    def is_missed(self, ranks: LocalRanks) -> bool:
        """Whether a start of all ranks waits in vain: the others serve without those of this host.

        After a cut of some seconds a launcher may reach the store before the others have recorded
        that they serve on.
        """
        now = time.monotonic()
        if not (self._serves_on and ranks.is_starting) or now < self._look_at:
            return False
        self._look_at = now + LOOK_S
        try:
            with closing(self._launch.deployment.opened_store()) as store:
                return ranks_to_start(store, self._launch)[1]
        except StoreError as exc:
            log.debug("ranks that serve are not known: %s", exc)
            return False

    def _refused(self, ranks: LocalRanks) -> frozenset[int]:
        """Ranks that refused to join, which would do so again until the files of a start change."""
        return frozenset(
            rank
            for rank, files in self._files.items()
            if ranks.has_rank_refused(rank) and not files.are_changed
        )

    def due(self, ranks: LocalRanks) -> list[int]:
        """Ranks to start now."""
        if self._launch.deployment.settings.topology.device != "cpu":
            return []  # ranks on GPUs serve on without a dead one, and take none
        now = time.monotonic()
        absent = ranks.absent(self._launch.ranks) - self._refused(ranks)
        for rank in absent - self._due.keys():
            self._due[rank] = now
            if not ranks.left_as_planned(rank):
                ran_s = now - self._started.get(rank, 0.0)
                self._due[rank] += self._restarts[rank].next_delay_s(ran_s)
        self._due = {rank: at for rank, at in self._due.items() if rank in absent}
        if now < self._look_at or min(self._due.values(), default=now + 1.0) > now:
            return []
        self._look_at = now + LOOK_S
        try:
            with closing(self._launch.deployment.opened_store()) as store:
                wanted, _ = ranks_to_start(store, self._launch)
        except StoreError as exc:
            log.debug("wanted ranks are not known: %s", exc)
            return []
        found = [rank for rank, at in self._due.items() if at <= now and rank in wanted]
        self._started.update(dict.fromkeys(found, now))
        for rank in found:
            self._files[rank] = self._launch.start_files()
            del self._due[rank]  # it may have ended again before the next look
        return found


def run_ranks(
    launch: Launch,
    supervision: SupervisionSettings,
    say: Callable[[str], None],
    *,
    keeps: bool = False,
) -> int:
    """Run the ranks of this host until all have ended well; returns the exit status.

    After a death they are started again; a store, peers and a host cache that are absent are waited
    for. Neither has an end but a signal, or a rank that refuses to start.

    Args:
        launch: what is started.
        supervision: delays of restarts.
        say: prints a line for operators.
        keeps: whether a refused start is tried again once what it refused has changed. So it is
            once ranks have served, or where a supervisor starts the launcher of ranks that have.
    """
    program = launch.imported()
    settle()  # before the fork: for the ranks too
    rank_file = write_rank_file(launch.deployment)
    restarts = Restarts(supervision.restart_after_death, supervision)
    stop, notifier = StopSignals(), Notifier()
    heart = Heartbeat(launch.deployment.opened_store, LAUNCHER, str(launch.host))
    excluded = ExcludedRanks(launch)
    retries = Restarts(sys.maxsize, supervision)  # delays of starts that wait for an absent part
    whose, record = f"launcher of host {launch.host}", partial(launch.note, WAITING)
    waits = WaitReports(whose, record, notifier, say)
    keeps = keeps or (notifier.is_heard and has_served(launch.deployment))
    rejoins = Rejoins(launch, supervision)
    generation: int | None = None
    died, has_said = "", False

    def start_anew(refusal: str, files: StartFiles) -> int:
        """Start all once more when what was refused has changed; returns the exit status."""
        assert launch.reread is not None, "else it is refused for good"
        say(f"{refusal}; trying again once {files} changes")
        heart.stop()
        heart.start()
        changed = launch.reread.wait_for_start(refusal, files, waits, stop, notifier.alive)
        heart.stop()
        if changed is None:
            heart.retire()
            return 128 + stop.received
        return run_ranks(replace(launch, deployment=changed), supervision, say, keeps=True)

    while True:
        files = launch.start_files()
        mine = heart.mine if generation is None else None
        prepare = partial(prepare_store, launch, generation, died, mine)
        try:
            prepared = once_reached(prepare, stop, notifier, say)
        except (ConfigError, CheckpointError) as exc:
            if launch.reread is None or not keeps:
                raise
            return start_anew(str(exc), files)
        if prepared is None:
            return 128 + stop.received
        generation = prepared.generation
        if not has_said:
            say(prepared.did)
        has_said = True
        started = time.monotonic()
        environ = partial(launch.environment, rank_file, members=prepared.members)
        environs = {
            rank: environ(rank, joins=prepared.joins)
            for rank in launch.ranks
            if rank in prepared.members
        }
        if not environs:
            say(f"none of ranks {list(launch.ranks)} should serve: {list(prepared.members)} do")
            heart.retire()
            return 0
        ranks = LocalRanks(launch.command, environs, program=program, joins=prepared.joins)
        heart.start()  # a thread: not before the fork
        notifier.ready()
        notifier.status("")  # the reason of the last restart is over

        def look(ranks: LocalRanks = ranks) -> None:
            notifier.alive()
            if ranks.waits_for is not None:
                waits.note(ranks.waits_for)
            if rejoins.is_missed(ranks):
                say("the other ranks serve without those of this one, which start again to join")
                ranks.end_start()
            for rank in rejoins.due(ranks) if not stop.received else ():
                say(f"rank {rank} is started, to join those that serve")
                heart.stop()  # no thread and no open store may cross the fork
                excluded.close()
                ranks.join(rank, launch.environment(rank_file, rank, [rank], joins=True))
                heart.start()

        with closing(excluded):
            how = ranks.wait(stop, look, excluded.look)
        if ranks.has_missed and not stop.received:
            died = ""
            heart.stop()
            continue
        if not how:
            by = f"stopped on purpose by {stop.name}" if stop.received else "without a signal"
            ended = f"the ranks of host {launch.host} have ended well, {by}"
            launch.note(STOPPED, ended)
            say(ended)
        if not how or stop.received:
            heart.retire()
            return 0 if not how else 128 + stop.received
        keeps |= not ranks.is_starting
        if ranks.has_refused and launch.reread is not None and keeps:
            return start_anew(f"{how}: it refused to start: {ranks.waits_for or how}", files)
        if ranks.has_refused:
            notifier.status(how)
            say(f"{how}: it refused to start, and is not started again")
            return REFUSED
        ran_s = time.monotonic() - started
        if ranks.has_waited:
            waits.note(ranks.waits_for or how)
            died, delay_s = "", retries.next_delay_s(ran_s)
        else:
            died, delay_s = how, restarts.next_delay_s(ran_s)
            why = f": {restarts} used up" if restarts.is_over_budget else ""
            told = f"{how}; starting the ranks of this host again in {delay_s:.1f} s{why}"
            notifier.status(told)
            say(told)
        if stop.wait(delay_s, notifier.alive):
            heart.retire()
            return 128 + stop.received
        heart.stop()
