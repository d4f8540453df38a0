"""Settings of an engine's plug-in, from the deployment's configuration file.

The plug-in reads the file that the commands read, with the same loader; it knows the settings that
it takes, and leaves the others to them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from eplb.core.cost import CostModel
from eplb.core.problem import Budget
from eplb.declared import Setting, check_fields
from eplb.errors import ConfigError
from eplb.settings.deployment import DeploymentSettings, WindowSettings
from eplb.settings.loader import CONFIG_VARIABLE, load
from eplb.settings.tree import Section, SettingsTree
from rebalance.assembly.config import ReportingConfig
from rebalance.weights.cache.address import HostCacheAddress, place_of_records
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.link.secret import SecretSettings, deployment_secret

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSettings:
    """Section ``engine``: which parts of the plug-in are on, and how it plans.

    Raises:
        ConfigError: a value is out of its range.
    """

    plan: Annotated[bool, Setting("plan in place of the engine")] = True
    shares: Annotated[bool, Setting("uneven shares of replicas; needs the policy")] = True
    tap: Annotated[bool, Setting("write loads and placements of the engine to the store")] = True
    mover: Annotated[
        bool, Setting("check the digests of experts that move, and repair wrong ones")
    ] = True
    check: Annotated[
        bool, Setting("compare live slots with the experts of the map, now and then")
    ] = True
    records: Annotated[
        Literal["auto", "on", "off"],
        Setting(
            "keep each expert from the load on, to replace lost ones; auto: where eplb host-cache "
            "runs; on: else in the ranks"
        ),
    ] = "auto"
    phase: Annotated[
        Literal["auto", "prefill", "decode", "mixed"],
        Setting("phase of the engine's forward passes; auto: by its scheduler's output"),
    ] = "auto"
    plan_time_ms: Annotated[
        float, Setting("search time of one plan, counted in steps", above=0, at_most=60_000)
    ] = 16.0
    max_moved: Annotated[
        float, Setting("part of all slots that a plan after the first may move", at_most=1)
    ] = 0.1
    failed_plans: Annotated[
        int,
        Setting(
            "plans in a row that fail before the engine's own balancer plans, until one succeeds",
            at_least=1,
            at_most=1000,
        ),
    ] = 3
    store_deadline_s: Annotated[
        float,
        Setting(
            "time without an answer of the store before the engine's own balancer plans, until it "
            "answers",
            above=0,
            at_most=86_400,
        ),
    ] = 600.0
    load_deadline_s: Annotated[
        float,
        Setting(
            "deadline for all ranks to load the plug-in, from the first that has loaded its "
            "weights; well below the engine's own wait (600 s with NCCL)",
            above=0,
            at_most=3600,
        ),
    ] = 300.0

    def __post_init__(self) -> None:
        check_fields(self)


class PluginSettings(SettingsTree):
    """What the plug-in takes from the deployment's file; other sections are left to others."""

    whole = frozenset({"engine"})

    deployment = Section("What runs where.", DeploymentSettings)
    engine = Section("The plug-in.", EngineSettings)
    planner = Section("What a plan aims at.", CostModel, Budget)
    host_cache = Section("Where records of experts are kept.", HostCacheSettings)
    network = Section("The secret.", SecretSettings)
    telemetry = Section("Samples and windows.", WindowSettings, ReportingConfig)

    def place_of_records(self) -> HostCacheAddress | None:
        """Where ``eplb host-cache`` of this host is found; None where no secret is."""
        deployment, file = self.deployment, self.network.secret_file
        try:
            secret = deployment_secret(
                file, os.environ, addresses={}, state_dir=deployment.state_dir, makes=False
            )
        except ConfigError as exc:
            log.info("eplb host-cache is not looked for: %s", exc)
            return None
        return place_of_records(deployment.name, secret)


def settings_of(environ: Mapping[str, str]) -> PluginSettings | None:
    """Return the settings of the deployment that ``EPLB_CONFIG`` names; None where it names none.

    ``EPLB_PROFILE`` names the profile of a file with several.

    Raises:
        ConfigError: the file cannot be read, names no deployment, or has a wrong value.
    """
    if not environ.get(CONFIG_VARIABLE):
        return None
    settings = load(PluginSettings, {}, config=None, environ=environ, reads_variables=False)
    if "deployment.name" not in settings.places:
        raise ConfigError(
            f"{environ[CONFIG_VARIABLE]} has no deployment.name, expected the name of a "
            "deployment: without it the plug-in does nothing"
        )
    return settings
