"""What components are given of the tree: the same for the demo and for a deployment's commands."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from api.config.tree import Settings
from eplb.core.problem import Budget
from eplb.decision.gate import CostModel
from eplb.decision.triggers import TriggerRules
from eplb.migration.build import Pace
from rebalance.build.config import ReportingConfig
from rebalance.controller.loop import ControllerSettings
from rebalance.controller.plans.planner_request import PlannerRequest
from rebalance.weights.cache.cache_settings import NUM_READERS, HostCacheSettings
from rebalance.weights.link.host_link_settings import HostLinkSettings
from telemetry.load.pruning import Retention
from telemetry.load.reporter import Tempo

SPOOL_FOLDER = "spool"  # in the state folder


def controller_settings(settings: Settings, pace: Pace, seed: int = 0) -> ControllerSettings:
    """How the controller decides."""
    return ControllerSettings(
        policy=settings.planner.policy,
        plan_windows=settings.planner.plan_windows,
        cost=CostModel(
            pay_back_s=settings.planner.pay_back_s,
            expert_part=settings.planner.expert_part,
            bytes_per_s=settings.planner.bytes_per_s,
            seconds_per_rebalance=settings.planner.seconds_per_rebalance,
            far_moves=settings.planner.far_moves,
            node_traffic=settings.planner.node_traffic,
            dead_zone=settings.planner.dead_zone,
        ),
        budget=Budget(
            max_moves=settings.planner.max_moves or None,
            target_imbalance=settings.planner.target_imbalance,
        ),
        pace=pace,
        seed=seed,
        retention=Retention(
            settings.telemetry.keep_samples_s,
            settings.telemetry.keep_minutes_s,
            settings.telemetry.keep_hours_s,
            settings.telemetry.keep_events,
        ),
        lease_ttl_s=settings.controller.lease_ttl_s,
        migration_deadline_s=settings.controller.migration_deadline_s,
        keep_every_windows=settings.controller.keep_every_windows,
        back_off_s=settings.controller.back_off_s,
        task_expiry_s=settings.controller.task_expiry_s,
        rollback_loss=settings.controller.rollback_loss,
        request=PlannerRequest(
            **{one.name: getattr(settings.planner, one.name) for one in fields(PlannerRequest)}
        ),
        triggers=TriggerRules(
            **{one.name: getattr(settings.controller, one.name) for one in fields(TriggerRules)}
        ),
        stage=settings.controller.stage,
        stage_layers=settings.controller.stage_layers,
        stage_loss=settings.controller.stage_loss,
        step_time_budget=settings.controller.step_time_budget,
    )


def pace_of(staging_experts: int, spare_slots: int) -> Pace:
    """Flip mode with spares, which needs no staging; copy mode without."""
    if spare_slots:
        return Pace(staging_experts=0, mode="flip", spare_slots=spare_slots)
    return Pace(staging_experts=staging_experts)


def reporting(settings: Settings, state_dir: Path) -> ReportingConfig:
    """How ranks report."""
    return ReportingConfig(
        settings.telemetry.spool_dir or state_dir / SPOOL_FOLDER,
        settings.telemetry.spool_mb * 1_000_000,
        Tempo(settings.telemetry.store_interval, settings.telemetry.state_interval),
    )


def host_cache_settings(
    settings: Settings, weights: Path | None, record_bytes: int, links: HostLinkSettings | None
) -> HostCacheSettings:
    """How every host keeps records; the record file lies beside the weights."""
    given, record_file = settings.host_cache, None
    if given.record_file and weights is not None:
        # Imported here: it loads torch, which a controller's process does without.
        from rebalance.weights.disk.record_file import record_file_beside

        record_file = record_file_beside(weights)
    return HostCacheSettings(
        mode=given.mode,
        budget_bytes=given.records * record_bytes if given.mode == "hot" else None,
        ring_records=given.records if given.mode == "ring" else None,
        record_file=record_file,
        num_readers=given.num_readers or NUM_READERS,
        links=links,
    )
