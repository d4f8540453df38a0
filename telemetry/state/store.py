"""The state store: the only shared memory of ranks, controller, API and simulator.

Ranks append samples and report their state. The controller folds samples, publishes a migration and
watches it. The ranks commit the serving placement after the swap. Each of them opens a
``StateStore`` of its own over one back end.

A new kind of record is declared in the module of its subject, as a frozen dataclass and a
``Table``, and written and read by a method of that module's part:

    runs        starts, reports of ranks, versions of processes
    samples     samples and roll-ups
    placements  placements, migrations, recovery
    membership  planned changes of the ranks that serve
    groups      the next group of ranks: offers to join, and its proposal
    proposals   plans that wait for an approval
    lease       the one controller, and its fencing token
    tasks       requests to the controller
    live        live settings and switches
    events      the journal
"""

from __future__ import annotations

from pathlib import Path

from eplb.clock import Clock
from eplb.errors import ConfigError
from eplb.settings.deployment import check_deployment_name
from eplb.settings.tree import without_password as without_password
from telemetry.state.backend import Backend
from telemetry.state.events import EventPart
from telemetry.state.groups import GroupPart
from telemetry.state.lease import LeasePart, LeaseWatch
from telemetry.state.live import LivePart
from telemetry.state.membership import MembershipPart
from telemetry.state.placements import PlacementPart
from telemetry.state.proposals import ProposalPart
from telemetry.state.redis_address import FORMS, SCHEMES
from telemetry.state.runs import RunsPart
from telemetry.state.samples import SamplePart
from telemetry.state.tasks import TaskPart


class StateStore(
    RunsPart,
    SamplePart,
    PlacementPart,
    MembershipPart,
    GroupPart,
    ProposalPart,
    LeasePart,
    TaskPart,
    LivePart,
    EventPart,
):
    """One deployment's memory. Methods may be called from any thread.

    Every method raises StoreError when the store itself fails (disk full, read-only, unreachable,
    damaged).

    Args:
        backend: where it is kept.
        monotonic: the clock by which leases stand; None: this process's.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        monotonic: Clock | None = None,
    ) -> None:
        PlacementPart.__init__(self)
        self.backend = backend
        self._watch = LeaseWatch(monotonic)
        self.deployment = backend.deployment

    def version(self) -> int:
        """Return a number that grows with each change that a reader may wait for.

        That is every event, a claimed task, an announcement, survivor report, offer to join and
        candidates; not a sample, a rank's report or a plan id.
        """
        return self.backend.version()

    def wait(self, version: int, timeout_s: float) -> int:
        """Return once the version differs from ``version``, or after ``timeout_s``."""
        return self.backend.wait(version, timeout_s)

    def close(self) -> None:
        """Release files and threads and end every wait; what was acknowledged stays."""
        self.backend.close()


def file_of(url: str | Path) -> Path | None:
    """Return the file that a store's URL names; None where it names no file."""
    scheme, colon, rest = str(url).partition(":")
    if isinstance(url, Path) or not colon or "/" in scheme:
        return Path(url)
    return Path(rest) if scheme == "sqlite" and rest else None


def names_store(place: str) -> bool:
    """Whether a place that may be any file is the URL of a store, complete or not."""
    scheme, colon, _ = place.partition(":")
    return bool(colon) and scheme in ("sqlite", *SCHEMES)


def open_store(url: str | Path, deployment: str) -> StateStore:
    """Open the store that ``url`` names.

    Args:
        url: ``memory:`` for one that ends with the process, ``sqlite:PATH`` or a plain path for a
            file, or a Redis URL as in ``telemetry/state/redis_address.py``.
        deployment: name of the deployment whose samples and placements it holds.

    Raises:
        ConfigError: another scheme, or a URL or name that the store cannot use.
        StoreError: the store cannot be used.
    """
    return StateStore(_backend_of(url, deployment))


def deployments_of(url: str | Path) -> list[str]:
    """Return the names of the deployments that ran or have a placement in a store, sorted.

    Raises:
        ConfigError: as ``open_store``.
        StoreError: there is no such file, or the store cannot be read.
    """
    path = file_of(url)
    if path is not None:
        from telemetry.state.sqlite_backup import deployments_in

        return deployments_in(path)
    if _is_redis(str(url)):
        from telemetry.state.redis import deployments_at

        return deployments_at(str(url))
    raise _unknown(str(url))


def _backend_of(url: str | Path, deployment: str) -> Backend:
    check_deployment_name(deployment)
    # Late: each brings what it needs, a database driver among it.
    if url == "memory:":
        from telemetry.state.memory import MemoryBackend

        return MemoryBackend(deployment)
    path = file_of(url)
    if path is not None:
        from telemetry.state.sqlite import SqliteBackend

        return SqliteBackend(path, deployment)
    if _is_redis(str(url)):
        from telemetry.state.redis import RedisBackend

        return RedisBackend(str(url), deployment)
    raise _unknown(str(url))


def _is_redis(url: str) -> bool:
    scheme, _, rest = url.partition(":")
    return scheme in SCHEMES and rest.startswith("//")


def _unknown(url: str) -> ConfigError:
    return ConfigError(
        f"unknown store {without_password(url)!r}, expected one of: memory:, sqlite:PATH, PATH, "
        f"{', '.join(FORMS)}"
    )
