"""What components are given of the tree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from api.config.deployment import RecordSources
from api.config.tree import Settings
from eplb.migration.build import Pace
from rebalance.build.config import ReportingConfig
from rebalance.preload.cache.cache_settings import HostCacheSettings
from rebalance.preload.hosts.host_link_settings import HostLinkSettings

SPOOL_FOLDER = "spool"  # in the state folder


def pace_of(staging_experts: int, spare_slots: int) -> Pace:
    """Flip mode with spares, which needs no staging; copy mode without."""
    if spare_slots:
        return Pace(staging_experts=0, mode="flip", spare_slots=spare_slots)
    return Pace(staging_experts=staging_experts)


def reporting(settings: Settings, state_dir: Path) -> ReportingConfig:
    """How ranks report: with their spool in the state folder, if no other is set."""
    given = settings[ReportingConfig]
    return replace(given, spool_dir=given.spool_dir or state_dir / SPOOL_FOLDER)


def host_cache_settings(
    settings: Settings, weights: Path | None, links: HostLinkSettings | None
) -> HostCacheSettings:
    """How every host keeps records; the record file lies beside the weights."""
    record_file = None
    if settings[RecordSources].record_file and weights is not None:
        # Imported here: it loads torch, which a controller's process does without.
        from rebalance.preload.disk.record_file import record_file_beside

        record_file = record_file_beside(weights)
    return replace(settings.host_cache, record_file=record_file, links=links)
