"""``eplb launch -- CMD``: the ranks of one host, started as torchrun does, restarted after a death.

    launcher of host 0 -- ranks 0..3 --+
                                       +-- meet, form a group, serve, end at one step
    launcher of host 1 -- ranks 4..7 --+

Launchers do not communicate. When a rank dies, the ranks of all hosts end (BrokenGroup), each
launcher starts its own again, and they meet anew. Started by torchrun, once for each rank, the
command takes that rank's place and becomes CMD.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Event

from api.deploy.checks.host import port_refusal, ports_of
from api.deploy.checks.tls import check_link_certificate
from api.deploy.deployment import Deployment
from api.deploy.first_placement import ensure_first_placement
from api.deploy.local_ranks import REFUSED, LocalRanks
from api.interrupts import StopSignals
from api.processes.devices import check_gpus
from api.processes.supervision import RestartBudget, SupervisionSettings
from eplb.errors import ConfigError, RankError, StoreError
from eplb.versions import RANKS, Announcement
from rebalance.build.description import RANK_FILE_VARIABLE
from rebalance.build.places import holder_of
from telemetry.state.joining import check_versions

PORTS_OF_RANKS = ("network.rendezvous_port", "network.rank_port")
# What a rank needs none of: the secret itself, and a store's password.
NOT_FOR_RANKS = ("EPLB_SECRET", "EPLB_STORE", "EPLB_DEPLOYMENT__STORE")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """What a launcher starts."""

    deployment: Deployment
    host: int
    command: Sequence[str]
    environ: Mapping[str, str]

    @property
    def ranks(self) -> range:
        """The ranks of this host."""
        return self.deployment.ranks_of(self.host)

    def environment(self, rank_file: str, local_rank: int) -> dict[str, str]:
        """The environment of one rank."""
        topology, network = self.deployment.settings.topology, self.deployment.settings.network
        passed = {name: text for name, text in self.environ.items() if name not in NOT_FOR_RANKS}
        return passed | {
            RANK_FILE_VARIABLE: rank_file,
            "RANK": str(self.ranks[local_rank]),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.deployment.topology.num_ranks),
            "LOCAL_WORLD_SIZE": str(len(self.ranks)),
            "GROUP_RANK": str(self.host),
            "GROUP_WORLD_SIZE": str(topology.nodes),
            "MASTER_ADDR": self.deployment.hosts[0],
            "MASTER_PORT": str(network.rendezvous_port),
        }


def check_start(launch: Launch) -> None:
    """Refuse what would keep the ranks of this host from starting.

    Raises:
        ConfigError: no such program, too few GPUs, a port that is in use, or a certificate that
            cannot be used.
        RankError: a rank's place is taken.
    """
    check_program(launch.command[0])
    check_link_certificate(launch.deployment, launch.host)
    if launch.deployment.settings.topology.device == "cuda":
        check_gpus(len(launch.ranks))
    for rank in launch.ranks:
        if (holder := holder_of(launch.deployment.name, rank)) is not None:
            raise RankError(
                f"rank {rank} of deployment {launch.deployment.name!r} is run by process {holder} "
                "of this host, expected none"
            )
    for setting, address, port in ports_of(launch.deployment, launch.host):
        if setting in PORTS_OF_RANKS and (refusal := port_refusal(address, port)):
            raise ConfigError(
                f"{port} of {address} ({setting}) cannot be used: {refusal}, expected a free port"
            )


def check_program(name: str) -> None:
    """Refuse a program that cannot be started.

    Raises:
        ConfigError: it is not there, or is no program.
    """
    if shutil.which(name) is None:
        raise ConfigError(f"{name} cannot be started: found no such program, expected one")


def prepare_store(launch: Launch, lost_after: int | None = None) -> tuple[int, str]:
    """Have the store name a first placement; returns its generation, and a sentence about it."""
    with closing(launch.deployment.opened_store()) as store:
        check_versions(store, Announcement(RANKS, ""))
        by = f"eplb launch, host {launch.host}"
        placement, wrote = ensure_first_placement(
            store, launch.deployment, by, lost_after=lost_after
        )
    did = "wrote the first placement" if wrote else "found a placement"
    where = launch.deployment.store_shown
    return placement.generation, f"{did}, generation {placement.generation}, in {where}"


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
    check_program(launch.command[0])
    check_link_certificate(launch.deployment, launch.host)
    if launch.deployment.settings.topology.device == "cuda":
        check_gpus(len(launch.ranks))
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


def run_ranks(
    launch: Launch, generation: int, supervision: SupervisionSettings, say: Callable[[str], None]
) -> int:
    """Run the ranks of this host until all have ended; returns the exit status.

    After a death they are started again, as often as the restart budget allows.

    Args:
        launch: what is started.
        generation: that the store names.
        supervision: how often ranks may be started again.
        say: prints a line for operators.
    """
    rank_file = write_rank_file(launch.deployment)
    budget = RestartBudget(supervision.restart_after_death, supervision.restart_window_s)
    stop = StopSignals()
    while True:
        environs = {
            rank: launch.environment(rank_file, local) for local, rank in enumerate(launch.ranks)
        }
        ranks = LocalRanks(launch.command, environs)
        how = ranks.wait(stop)
        if not how or stop.received:
            return 0 if not how else 128 + stop.received
        if ranks.has_refused:
            say(f"{how}: it refused to start, and is not started again")
            return REFUSED
        if budget.is_used_up:
            say(f"{how}; {budget} used up, ending")
            return 1
        while True:  # a store that fails is waited for, as long as the budget lasts
            budget.spend()
            say(f"{how}; starting the ranks of this host again")
            try:
                generation = prepare_store(launch, lost_after=generation)[0]
                break
            except StoreError as exc:
                if budget.is_used_up or stop.received:
                    raise
                how = str(exc)
                Event().wait(supervision.restart_delay_s)
