"""Sections of the processes around the ranks; ``api/config/migration.py`` has those of the ranks.

The components take dataclasses (``AgentSettings``, ``StageSettings``, ...); a section is what of
them a user may set, with the same defaults. A test compares the two.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Literal

from pydantic import field_validator

from api.config.fields import HOUR_S, YEAR_S, Number, Section, Whole, files_together, setting
from api.demo.settings import DEPLOYMENT
from api.http.limits import HttpLimits
from api.processes.supervision import SupervisionSettings
from rebalance.engines.common.plugin_settings import EngineSettings
from rebalance.weights.link.tls import Certificate
from telemetry.load.pruning import Retention
from telemetry.load.reporter import Tempo

EVERY = "*"  # in place of the names of deployments


class Deployment(Section):
    """What runs where."""

    name: str = setting(
        DEPLOYMENT,
        "of the deployment, in the store and on its hosts; the demo is always `demo`",
        short="deployment_name",
        min_length=1,
        max_length=64,
    )
    state_dir: Path = setting(Path(".eplb"), "folder of the store, the weights and the journals")
    store: str = setting(
        "", "URL of the load store; empty: a file in the state folder", secret=True
    )

    @field_validator("store")
    @classmethod
    def _store_is_shared(cls, store: str) -> str:
        if store == "memory:":
            raise ValueError("expected a store that several processes can share")
        return store


class Engine(Section):
    """The plug-in inside a serving engine. It reads the configuration file alone, no variables."""

    plan: bool = setting(EngineSettings.plan, "plan in place of the engine")
    shares: bool = setting(EngineSettings.shares, "uneven shares of replicas; needs the policy")
    tap: bool = setting(EngineSettings.tap, "write loads and placements of the engine to the store")
    mover: bool = setting(EngineSettings.mover, "check the digests of experts that move")
    check: bool = setting(
        EngineSettings.check, "compare live slots with the experts of the map, now and then"
    )
    records_gb: Number = setting(
        EngineSettings.records_gb,
        "memory of a rank for records of experts, from which lost ones are taken; 0: none",
        unit="GB",
        ge=0,
        le=100_000,
    )
    records_dir: str = setting(
        EngineSettings.records_dir, "folder of files with records of experts; empty: none"
    )
    phase: Literal["auto", "prefill", "decode", "mixed"] = setting(
        "auto", "of the engine's forward passes; auto: by its scheduler's output"
    )
    plan_time_ms: Number = setting(
        EngineSettings.plan_time_ms,
        "search of one plan, counted in steps",
        gt=0,
        le=60_000,
    )
    max_moved: Number = setting(
        EngineSettings.max_moved,
        "part of all slots that a plan after the first may move",
        ge=0,
        le=1,
    )
    load_deadline_s: Number = setting(
        EngineSettings.load_deadline_s, "for all ranks to load the plug-in", gt=0, le=HOUR_S
    )


class Telemetry(Section):
    """Samples, load windows, and how long they are kept."""

    window_tokens: Whole = setting(
        16384, "tokens of all ranks in a load window", ge=1, le=1_000_000_000
    )
    window_steps: Whole = setting(
        64,
        "forward passes in a load window of a deployment; the demo has window_tokens",
        ge=1,
        le=1_000_000,
    )
    sample_steps: Whole = setting(
        16, "forward passes in a sample, a divisor of window_steps", ge=1, le=1_000_000
    )
    window_seconds: Number = setting(
        0.0,
        "length of a load window; 0: window_steps, or as many steps as window_tokens take",
        unit="s",
        ge=0,
        le=HOUR_S,
    )
    spool_dir: Path | None = setting(
        None, "where ranks keep samples that the store lacks; none: the state folder"
    )
    spool_mb: Whole = setting(64, "disk for such samples, each rank", ge=1, le=1_000_000)
    store_interval: Number = setting(
        Tempo.write_s, "least time between two writes of a rank", unit="s", ge=0, le=HOUR_S
    )
    state_interval: Number = setting(
        Tempo.state_s, "how long a rank's state may wait for samples", unit="s", ge=0, le=HOUR_S
    )
    keep_samples_s: Number = setting(
        Retention.samples_s,
        "age at which samples become roll-ups of a minute",
        gt=0,
        le=10 * YEAR_S,
    )
    keep_minutes_s: Number = setting(
        Retention.minutes_s,
        "age at which roll-ups of a minute become roll-ups of an hour",
        gt=0,
        le=10 * YEAR_S,
    )
    keep_hours_s: Number = setting(
        Retention.hours_s, "age at which roll-ups of an hour are removed", gt=0, le=10 * YEAR_S
    )
    keep_events: Whole = setting(
        Retention.events, "events that are kept, the latest", unit="events", ge=0, le=10_000_000
    )


class Http(Section):
    """The HTTP service and its limits."""

    host: str = setting(
        "127.0.0.1", "address that it listens on; not a loopback one: a secret", min_length=1
    )
    port: Whole = setting(8765, "port; 0: any free one", ge=0, le=65535)
    tls_certificate_file: Path | None = setting(
        None, "certificate with those up to its authority; none: http, without encryption"
    )
    tls_key_file: Path | None = setting(None, "its key, without a passphrase")
    deployments: str = setting(
        "",
        "of the store that `eplb serve` shows beside its own, as `a, b`; `*`: all; empty: none",
        max_length=5000,
    )
    metrics_level: Literal["default", "layer", "rank"] = setting(
        "default", "series of /metrics for each layer, or each layer and rank"
    )
    metrics_host: str = setting(
        "", "address of `eplb serve` for /metrics alone; not a loopback one: a secret; empty: none"
    )
    metrics_port: Whole = setting(8766, "port of metrics_host; 0: any free one", ge=0, le=65535)
    max_connections: Whole = setting(
        HttpLimits.max_connections,
        "open at a time; never more than a quarter of the descriptors",
        unit="connections",
        ge=2,
        le=65_536,
    )
    max_requests: Whole = setting(
        HttpLimits.max_requests,
        "in progress at a time; further ones get status 503",
        unit="requests",
        ge=1,
        le=39,
    )
    max_streams: Whole = setting(
        HttpLimits.max_streams,
        "of events, open at a time; further ones get status 503",
        unit="streams",
        ge=1,
        le=65_536,
    )
    max_body_bytes: Whole = setting(
        HttpLimits.max_body_bytes, "of a request", ge=1024, le=1_073_741_824
    )
    request_deadline_s: Number = setting(
        HttpLimits.request_deadline_s,
        "for the headers and the body of a request",
        gt=0,
        le=HOUR_S,
    )
    unread_deadline_s: Number = setting(
        HttpLimits.unread_deadline_s, "for a client to read an answer", ge=0.001, le=HOUR_S
    )

    def limits(self) -> HttpLimits:
        """Give the limits that the service takes."""
        return HttpLimits(**self.model_dump(include={one.name for one in fields(HttpLimits)}))

    @property
    def deployment_names(self) -> tuple[str, ...]:
        """Of the deployments that are shown beside the service's own; EVERY: all of the store."""
        return tuple(name for part in self.deployments.split(",") if (name := part.strip()))

    @property
    def certificate(self) -> Certificate | None:
        """Of the service; None: it serves http.

        Raises:
            ConfigError: its key is not set, or the key without it.
        """
        given = files_together(self, "http", "tls_certificate_file", "tls_key_file")
        return Certificate(*given) if given else None


class Supervision(Section):
    """Restarts of processes."""

    restart_after_death: Whole = setting(
        3,
        "restarts of the ranks within restart_window_s; one more exit ends the deployment",
        unit="restarts",
        ge=0,
        le=1_000_000,
    )
    process_restarts: Whole = setting(
        SupervisionSettings.restarts,
        "restarts of each other process within restart_window_s; then it stays down",
        unit="restarts",
        ge=0,
        le=1_000_000,
    )
    restart_window_s: Number = setting(
        SupervisionSettings.window_s, "window of both restart budgets", ge=1, le=2_592_000
    )
    restart_delay_s: Number = setting(
        SupervisionSettings.max_delay_s, "longest delay before a restart", ge=0, le=HOUR_S
    )
    hung_after_s: Number = setting(
        SupervisionSettings.hung_after_s,
        "without a report, after which a process is killed; longer than a plan takes",
        ge=1,
        le=HOUR_S,
    )
    start_deadline_s: Number = setting(
        SupervisionSettings.start_deadline_s,
        "without progress of a start, however long it takes; then the process is killed",
        ge=1,
        le=HOUR_S,
    )

    def settings(self) -> SupervisionSettings:
        """Give the settings that the supervisor takes."""
        return SupervisionSettings(
            self.process_restarts,
            self.restart_window_s,
            self.restart_delay_s,
            self.hung_after_s,
            self.start_deadline_s,
        )


class Log(Section):
    """The log of every process, on its error stream.

    A JSON line has ``time`` (UTC), ``level``, ``logger``, ``message``, ``deployment`` and
    ``process``; where they are known ``rank``, ``generation`` and ``task``; with an exception
    ``exception``. A message that repeats more than 20 times a minute is dropped and counted.
    """

    format: Literal["text", "json"] = setting(
        "text", "one line of text, or one JSON object a line", short="log_format"
    )
    level: Literal["debug", "info", "warning", "error"] = setting(
        "warning", "least level that is written", short="log_level"
    )
