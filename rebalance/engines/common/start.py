"""The start of a plug-in: in one process of an engine, and on all ranks of a group together.

All ranks of a group have the plug-in with the same settings, or none of them uses it. A rank
without the plug-in takes part in no collective of ours, so this must not be one: each rank writes a
line into the key-value store under its process group, and the first that has all lines, or has
waited long enough, writes the decision that all others read.

A gauge shows which parts of the plug-in are on in a process.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, Any

import eplb
from eplb.core.model import named_ranks
from eplb.errors import ConfigError, RankError, reason_of
from eplb.packages import LIBRARIES, PACKAGES, check_packages
from eplb.settings.loader import CONFIG_VARIABLE, GROUP_VARIABLE, PROFILE_NAME

if TYPE_CHECKING:
    from rebalance.engines.common.plugin_settings import PluginSettings

log = logging.getLogger(__name__)

NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
GAUGE = "eplb_engine_plugin_loaded"
PREFIX = "eplb-plugin"
REFUSED = "refused: "  # before the reason of a rank that cannot take part
PATIENCE_S = 10.0  # before a rank says whom it waits for
LOG_FORMAT = "EPLB %(levelname)s %(asctime)s [%(process)d] %(message)s"


@cache
def plugin_gauge() -> Any:
    """The gauge of this process; None where there is none."""
    # Late: an engine brings prometheus_client; a process without it has the log line alone.
    try:
        from prometheus_client import Gauge

        return Gauge(
            GAUGE,
            "1 while a part of the EPLB plug-in works in this process, else 0",
            ["engine", "part"],
            multiprocess_mode="liveall",  # each process of the engine has its own value
        )
    except Exception as exc:
        log.warning("the gauge %s cannot be made: %s", GAUGE, exc)
        return None


_parts: dict[str, bool] = {}  # the parts of this process, which runs one engine


def parts_off() -> list[str]:
    """Parts that are off, or have found a fault."""
    return sorted(part for part, is_on in _parts.copy().items() if not is_on)


def set_part(engine: str, part: str, *, is_on: bool) -> None:
    """Set the gauge of one part."""
    _parts[part] = is_on
    gauge = plugin_gauge()
    if gauge is not None:
        gauge.labels(engine, part).set(int(is_on))


def say_who_plans(engine: str, why: str, *, is_engine: bool) -> None:
    """Log that the engine's own balancer plans from now on, or this plug-in, and set the gauge.

    Args:
        engine: its name.
        why: the engine plans, as rank 0 knows it; "": another rank.
        is_engine: all ranks have agreed on it.
    """
    set_part(engine, "policy", is_on=not is_engine)
    own = f"{NAMES[engine]}'s own balancer"
    if is_engine:
        log.error("%s plans from now on: %s", own, why or "the log of rank 0 has the reason")
    else:
        log.warning("this plug-in plans again, in place of %s", own)


def show_log() -> None:
    """Write the log of this project to the error stream of the process, with a prefix.

    vLLM configures its own logger alone, and SGLang its root logger after it has loaded plug-ins.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    for package in ("eplb", *PACKAGES):
        logger = logging.getLogger(package)
        logger.setLevel(logging.INFO)
        logger.propagate, logger.handlers = False, [handler]  # an engine may call this again


def load_plugin(
    engine: str, environ: Mapping[str, str], install: Callable[[PluginSettings], Iterable[str]]
) -> bool:
    """Load a plug-in if ``EPLB_CONFIG`` names a deployment; whether it is loaded.

    What is wrong is logged in one sentence, and the engine starts as without the plug-in.

    Args:
        engine: its name.
        environ: of the process.
        install: yields what of the plug-in's assumptions about the engine does not hold, and then
            hooks it. Its imports are late: they need torch, numba and the engine, which a process
            without a deployment does without.
    """
    if not environ.get(CONFIG_VARIABLE):
        return False
    try:
        check_packages(("runtime", "telemetry", "rebalance"))
        check_libraries(LIBRARIES)  # first: what follows imports them
        from rebalance.engines.common.plugin_settings import settings_of
        from telemetry.state.store import file_of

        settings = settings_of(environ)
        assert settings is not None, "the variable is set"
        if file_of(settings.deployment.store_url) is None:
            check_libraries(["redis"])
        for refusal in install(settings):
            raise ConfigError(refusal)
    except Exception as exc:  # whatever it is, the engine starts
        set_part(engine, "plugin", is_on=False)
        log.error("the EPLB plug-in is not loaded: %s", reason_of(exc))
        return False
    log.info("EPLB plug-in loaded for deployment %r", settings.deployment.name)
    return True


def check_libraries(names: Iterable[str]) -> None:
    """Check that libraries are installed, before a part that needs them fails while it serves.

    Raises:
        ConfigError: some are missing; the message names all of them.
    """
    missing = " ".join(name for name in names if find_spec(name) is None)
    if missing:
        raise ConfigError(f"{missing}: not installed here, expected: pip install {missing}")


def facts_of(engine: str, settings: PluginSettings) -> str:
    """What must be alike on every rank: versions, and the settings that are given."""
    return f"{engine} {version(engine)}, eplb {eplb.__version__}, {settings.values}"


@dataclass(frozen=True)
class EngineGroup:
    """An EP group among those of a deployment: a pipeline stage, or a replica of the model."""

    name: str = ""  # "": the deployment has no other
    engine: str = ""  # the value of EPLB_GROUP
    all: tuple[str, ...] = ()  # names of the groups of this engine, this one among them


def group_of(environ: Mapping[str, str], **places: tuple[int, int]) -> EngineGroup:
    """The group of a process.

    Args:
        environ: of the process.
        places: by kind of group, the number of this one and how many the engine has.

    Raises:
        ConfigError: ``EPLB_GROUP`` is no name.
    """
    engine = environ.get(GROUP_VARIABLE, "")
    if engine and not PROFILE_NAME.fullmatch(engine):
        raise ConfigError(f"{GROUP_VARIABLE} is {engine!r}, expected a name such as replica-0")
    several = {kind: place for kind, place in places.items() if place[1] > 1}
    words = [[engine]] if engine else []
    words += [
        [f"{kind}{number}" for number in range(count)] for kind, (_, count) in several.items()
    ]
    own = [engine] if engine else []
    own += [f"{kind}{number}" for kind, (number, _) in several.items()]
    return EngineGroup(
        "-".join(own), engine, tuple(map("-".join, product(*words))) if words else ()
    )


@dataclass(frozen=True)
class Joined:
    """What all ranks share from now on."""

    group: EngineGroup
    run: str
    base_generation: int  # of placements: each start of the engine begins above all earlier ones


def join(
    engine: str,
    store: Any,
    ranks: str,
    rank: int,
    size: int,
    *,
    group: EngineGroup,
    facts: str,
    deadline_s: float,
    refusal: str = "",
) -> Joined:
    """Wait for the other ranks of a group, up to a deadline.

    Args:
        engine: its name, the first part of the run's.
        store: ``torch.distributed.Store`` that all ranks reach.
        ranks: that are the group, in words that no other group of this store has.
        rank: in the group.
        size: of the group.
        group: by its name.
        facts: as ``facts_of``.
        deadline_s: for all ranks to have loaded the plug-in.
        refusal: why this rank cannot take part; "" if it can.

    Raises:
        RankError: a rank is missing, refuses or has other facts; then it is raised on every rank.
    """
    key = f"{PREFIX}/{ranks}"
    lines = [f"{key}/{other}" for other in range(size)]
    facts = f"group {group.name!r}, {facts}" if group.name else facts
    store.set(lines[rank], f"{REFUSED}{refusal}" if refusal else facts)
    _wait_for(store, lines, min(PATIENCE_S, deadline_s))
    if missing := _missing(store, lines):
        waiting = f"rank {rank} of {size} has loaded its weights and waits for"
        log.warning("%s %s, at most %g s", waiting, named_ranks(missing), deadline_s)
    if not _wait_for(store, lines, deadline_s - PATIENCE_S):
        refused = (
            f"ranks {_missing(store, lines)} of {size} did not load the plug-in within "
            f"{deadline_s:g} s, expected all"
        )
    else:
        refused = _difference([str(store.get(line), "utf-8") for line in lines])
    now, words = time.time(), (engine, *filter(None, [group.name]), time.strftime("%Y%m%dT%H%M%S"))
    proposal = {
        "refused": refused,
        "run": "-".join((*words, secrets.token_hex(3))),
        "base": int(now),
    }
    # The first writer wins: a rank that gave up and one that did not cannot decide differently.
    decided = store.compare_set(f"{key}/decision", "", json.dumps(proposal))
    decision = json.loads(str(decided, "utf-8"))
    if decision["refused"]:
        raise RankError(f"rank {rank}: {decision['refused']}")
    log.info("rank %d of %d, run %s", rank, size, decision["run"])
    return Joined(group, decision["run"], decision["base"])


def _wait_for(store: Any, lines: list[str], time_s: float) -> bool:
    """Wait until all lines are there; whether they are."""
    if time_s > 0:
        with suppress(RuntimeError):  # torch's DistStoreError among them
            store.wait(lines, timedelta(seconds=time_s))
            return True
    return bool(store.check(lines))


def _missing(store: Any, lines: list[str]) -> list[int]:
    return [rank for rank, line in enumerate(lines) if not store.check([line])]


def _difference(lines: list[str]) -> str:
    """Why ranks with these lines cannot work together; "" if they can."""
    for rank, line in enumerate(lines):
        if line.startswith(REFUSED):
            return f"rank {rank} refuses: {line.removeprefix(REFUSED)}"
    for rank, line in enumerate(lines):
        if line != lines[0]:
            return f"rank {rank} has {line}, rank 0 has {lines[0]}, expected the same"
    return ""
