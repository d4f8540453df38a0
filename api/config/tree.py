"""Every setting of the commands: the sections, and the classes whose fields they are.

A setting is added where it is used: as a field of one of these classes, with a ``Setting``. The
file, the environment, ``--setting``, live settings, REST and docs/configuration.md follow from it.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from api.config.deployment import (
    HttpSettings,
    ModelSettings,
    NetworkSettings,
    RecordSources,
    TopologySettings,
)
from api.processes.supervision import SupervisionSettings
from api.terminal.logs import LogSettings
from eplb.core.cost import CostModel
from eplb.core.problem import Budget
from eplb.decision.triggers import TriggerRules
from eplb.settings import loader
from eplb.settings.deployment import DeploymentSettings, WindowSettings
from eplb.settings.tree import Section, SettingsTree
from rebalance.assembly.config import NetworkConfig, RankConfig, ReportingConfig
from rebalance.controller.plans.planner_request import PlannerRequest
from rebalance.controller.settings import ControllerSettings
from rebalance.engines.common.plugin_settings import EngineSettings
from rebalance.stage.stage_settings import StageBudgets
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.link.secret import SecretSettings
from telemetry.load.pruning import Retention
from telemetry.load.reporter import Tempo
from telemetry.state.live import Control


class Settings(SettingsTree):
    """Every setting, by section."""

    defaults: ClassVar = {"controller.stage": "observe"}  # a new deployment moves nothing

    deployment = Section("What runs where.", DeploymentSettings)
    model = Section(
        "The model of a deployment: shapes, or a checkpoint whose `config.json` gives them. A "
        "shape that is given beside a `config.json` must agree with it.",
        ModelSettings,
    )
    topology = Section(
        "The ranks of a deployment, and the hosts that they run on. A node is a host here.",
        TopologySettings,
    )
    network = Section(
        "The port, deadlines and the secret of a deployment.",
        NetworkSettings,
        SecretSettings,
        NetworkConfig,
    )
    controller = Section(
        "When plans are made, and which are carried out.", ControllerSettings, Control, TriggerRules
    )
    planner = Section("What a plan aims at.", CostModel, Budget, PlannerRequest)
    agent = Section(
        "The vote and the migrations of a rank; alike on every rank (`RankConfig`).", RankConfig
    )
    staging = Section(
        "What staging may take of links. 0: the default of the device (CPU or GPU).", StageBudgets
    )
    host_cache = Section(
        "The records that a host keeps in memory for its ranks.", HostCacheSettings, RecordSources
    )
    telemetry = Section(
        "Samples, load windows, and how long they are kept.",
        WindowSettings,
        ReportingConfig,
        Tempo,
        Retention,
    )
    engine = Section(
        "The plug-in inside a serving engine. It reads the configuration file alone, no variables.",
        EngineSettings,
    )
    http = Section("The HTTP service.", HttpSettings)
    supervision = Section("Restarts of processes.", SupervisionSettings)
    log = Section(
        "The log of every process, on its error stream. A JSON line has `time` (UTC), `level`, "
        "`logger`, `message`, `deployment` and `process`; where they are known `rank`, "
        "`generation` and `task`; with an exception `exception`. A message that repeats more than "
        "20 times a minute is dropped and counted.",
        LogSettings,
    )


load = partial(loader.load, Settings)
profile_names = partial(loader.profile_names, Settings)
