"""The tree of settings, and the names of each setting.

``section.name`` is the full name. A name that only one section has stands for it without the
section: ``ranks`` is ``demo.ranks``. The environment variable is ``EPLB_`` and either name in
capitals, with two underscores for the point: ``EPLB_RANKS``, ``EPLB_DEMO__RANKS``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from pydantic.fields import FieldInfo

from api.config.deployment import Batch, ModelSettings, NetworkSettings, TopologySettings
from api.config.fields import Section, about
from api.config.migration import Agent, HostCache, HostLink, Staging, Transport
from api.config.planning import Controller, Planner
from api.config.sections import (
    Deployment,
    Engine,
    Http,
    Log,
    Supervision,
    Telemetry,
)
from api.demo.settings import DemoSettings
from telemetry.state.store import without_password

ENV_PREFIX = "EPLB_"


class Settings(Section):
    """Every setting, by section."""

    demo: DemoSettings = DemoSettings()
    deployment: Deployment = Deployment()
    model: ModelSettings = ModelSettings()
    topology: TopologySettings = TopologySettings()
    network: NetworkSettings = NetworkSettings()
    batch: Batch = Batch()
    planner: Planner = Planner()
    controller: Controller = Controller()
    agent: Agent = Agent()
    staging: Staging = Staging()
    transport: Transport = Transport()
    host_cache: HostCache = HostCache()
    host_link: HostLink = HostLink()
    telemetry: Telemetry = Telemetry()
    engine: Engine = Engine()
    http: Http = Http()
    supervision: Supervision = Supervision()
    log: Log = Log()


@dataclass(frozen=True)
class Known:
    """One setting of the tree."""

    path: str  # section.name
    short: str  # the name without a section that stands for it; "" where none does
    field: FieldInfo

    @property
    def section(self) -> str:
        """The table that it is in."""
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """Its name in that table."""
        return self.path.partition(".")[2]

    @property
    def shown(self) -> str:
        """The name under which messages report it."""
        return self.short or self.path

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return ENV_PREFIX + self.path.replace(".", "__").upper()

    @property
    def is_live(self) -> bool:
        """Whether a running deployment takes a change of it from the store."""
        return bool(about(self.field, "live"))

    def value_in(self, settings: Settings) -> Any:
        """Give its value."""
        return getattr(getattr(settings, self.section), self.name)

    def masked(self, value: Any) -> Any:
        """Give a value as it may be shown."""
        return without_password(str(value)) if about(self.field, "secret") else value


def section_class(name: str) -> type[Section]:
    """Give the class of a section."""
    return cast(type[Section], Settings.model_fields[name].annotation)


@cache
def known_settings() -> Mapping[str, Known]:
    """Give every setting by its full name, in the order of the tree."""
    fields = {
        f"{section}.{name}": field
        for section in Settings.model_fields
        for name, field in section_class(section).model_fields.items()
    }
    times = Counter(path.partition(".")[2] for path in fields)

    def short(path: str, field: FieldInfo) -> str:
        name = path.partition(".")[2]
        return str(about(field, "short")) or (name if times[name] == 1 else "")

    return {path: Known(path, short(path, field), field) for path, field in fields.items()}


@cache
def known_names() -> Mapping[str, Known]:
    """Give every setting by each of its names, the short ones first."""
    known = known_settings().values()
    return {one.short: one for one in known if one.short} | {one.path: one for one in known}
