"""Sections of what decides: the planner and the controller."""

from __future__ import annotations

from typing import Literal

from api.config.fields import HOUR_S, YEAR_S, Number, Section, Whole, setting
from eplb.core.cost import CostModel
from eplb.core.problem import Budget
from eplb.decision.triggers import TriggerRules
from rebalance.controller.plans.planner_request import PlannerRequest


class Planner(Section):
    """What a plan aims at."""

    policy: str = setting("auto", "placement policy", min_length=1, live=True)
    plan_windows: Whole = setting(16, "load windows that a plan uses", ge=1, le=64, live=True)
    pay_back_s: Number = setting(
        CostModel.pay_back_s,
        "serving time within which a move must save what it costs",
        ge=0,
        le=1_000_000_000,
        live=True,
    )
    max_moves: Whole = setting(
        0,
        "most experts that one plan moves; 0: no limit",
        unit="experts",
        ge=0,
        le=10**9,
        live=True,
    )
    target_imbalance: Number = setting(
        Budget.target_imbalance,
        "max/mean rank load of a layer at or below which the layer is not changed",
        ge=1,
        le=1_000_000,
        live=True,
    )
    objective: Literal["tokens", "time", "auto"] = setting(
        PlannerRequest.objective,
        "what a plan balances: tokens, or the experts' time by a measured curve; `auto`: time "
        "where the curve was given or measured and reading weights takes longer than the products "
        "of a step's tokens, else tokens",
        live=True,
    )
    curve: str = setting(
        PlannerRequest.curve,
        "microseconds of an expert by its tokens in a step, `tokens:us, ...`; empty: as the ranks "
        "measured it at their start, else that of DeepSeek-V3 in FP8 on an H200",
        max_length=4_000,
        live=True,
    )
    dispatch: Literal["even", "weighted", "sglang_static", "ascend_mod", "per_source"] = setting(
        "weighted", "rule by which the engine chooses the replica for a token", live=True
    )
    min_domains: Whole = setting(
        PlannerRequest.min_domains,
        "failure domains of each expert, the costliest experts first, as far as slots allow",
        unit="domains",
        ge=1,
        le=10_000,
        live=True,
    )
    rank_speed: str = setting(
        PlannerRequest.rank_speed,
        "measured speeds, `rank:speed, ...`; 1 is nominal, and that of ranks without one",
        max_length=20_000,
        live=True,
    )
    redundancy: str = setting(
        PlannerRequest.redundancy,
        "redundant slots that a layer uses, `layer:slots, ...`, layers from 0; those without one "
        "use all",
        max_length=20_000,
        live=True,
    )
    pins: str = setting(
        PlannerRequest.pins,
        "ranks that must hold an expert, `layer/expert:rank+rank, ...`, layers from 0, `*`: each "
        "layer; see /api/v1/pins",
        max_length=20_000,
        live=True,
    )
    cordons: str = setting(
        PlannerRequest.cordons,
        "ranks that take no further experts, `rank:cordon`, or hold none, `rank:drain`; see "
        "/api/v1/ranks",
        max_length=20_000,
        live=True,
    )
    decode_weight: Number = setting(
        PlannerRequest.decode_weight,
        "weight of decode in a plan, for ranks that serve prefill too; 0: phases are summed",
        unit="",
        ge=0,
        le=0.99,
        live=True,
    )
    expert_part: Number = setting(
        CostModel.expert_part,
        "part of a step that routed experts take at perfect balance",
        unit="",
        gt=0,
        le=1,
        live=True,
    )
    bytes_per_s: Number = setting(
        CostModel.bytes_per_s,
        "rate at which a rank receives experts, for the price of a move",
        unit="bytes/s",
        ge=1,
        le=1e15,
        live=True,
    )
    seconds_per_rebalance: Number = setting(
        CostModel.seconds_per_rebalance,
        "serving time that votes and swaps of one rebalance take",
        unit="s",
        ge=0,
        le=HOUR_S,
        live=True,
    )
    far_moves: Number = setting(
        CostModel.far_moves,
        "near moves that one from another node counts as",
        unit="moves",
        ge=0,
        le=1_000_000,
        live=True,
    )
    node_traffic: Number = setting(
        CostModel.node_traffic,
        "imbalance that all tokens crossing nodes count as; 0: not counted",
        unit="",
        ge=0,
        le=1_000_000,
        live=True,
    )
    dead_zone: bool = setting(
        CostModel.dead_zone, "count a gain only by the time that it saves by the curve", live=True
    )


class Controller(Section):
    """When plans are made, and which are carried out."""

    movement: bool = setting(True, "the kill switch: off means that no weight moves", live=True)
    observe: bool = setting(False, "plan and report, publish no migration", live=True)
    poll_s: Number = setting(0.2, "longest wait for a change of the store", gt=0, le=HOUR_S)
    lease_ttl_s: Number = setting(
        10.0,
        "time to live of the controller's and the deployment's lease; longer than a plan takes",
        gt=0,
        le=HOUR_S,
    )
    migration_deadline_s: Number = setting(
        60.0, "age at which an open migration is withdrawn", gt=0, le=HOUR_S, live=True
    )
    keep_every_windows: Whole = setting(
        8, "windows between two events of the same KEEP decision", ge=1, le=1_000_000, live=True
    )
    back_off_s: Number = setting(
        10.0,
        "wait after a migration that failed, twice as long after each further one, 600 s at most",
        ge=0,
        le=HOUR_S,
        live=True,
    )
    task_expiry_s: Number = setting(
        300.0, "age at which a queued request is refused; 0: never", ge=0, le=YEAR_S, live=True
    )
    rollback_loss: Number = setting(
        0.0,
        "imbalance by which a plan has made its first windows worse, at which it is taken back; "
        "0: never",
        unit="",
        ge=0,
        le=1_000_000,
        live=True,
    )
    interval_tokens: Whole = setting(
        TriggerRules.interval_tokens,
        "prefill tokens from one plan to the next; see operations.md; 0: not a trigger",
        ge=0,
        le=10**15,
        live=True,
    )
    interval_s: Number = setting(
        TriggerRules.interval_s,
        "time from one plan to the next; 0: no trigger",
        ge=0,
        le=YEAR_S,
        live=True,
    )
    start_imbalance: Number = setting(
        TriggerRules.start_imbalance,
        "imbalance of a window at which a plan is made; 0: not a trigger",
        unit="",
        ge=0,
        le=1_000_000,
        live=True,
    )
    rearm_imbalance: Number = setting(
        TriggerRules.rearm_imbalance,
        "imbalance below which start_imbalance may trigger again; 0: the same",
        unit="",
        ge=0,
        le=1_000_000,
        live=True,
    )
    cool_down_s: Number = setting(
        TriggerRules.cool_down_s,
        "time after a commit in which no load starts a plan",
        ge=0,
        le=YEAR_S,
        live=True,
    )
    stage: Literal["observe", "propose", "layers", "all"] = setting(
        "observe",
        "how much of a plan is carried out; the demo's default is `all`; see Staged rollout in "
        "operations.md",
        live=True,
    )
    stage_layers: Whole = setting(
        4,
        "layers that a plan changes in the stage `layers`",
        unit="layers",
        ge=1,
        le=10_000,
        live=True,
    )
    stage_loss: Number = setting(
        0.0,
        "imbalance by which a plan has made its first windows worse, at which the stage goes one "
        "step back; 0: never",
        unit="",
        ge=0,
        le=1_000_000,
        live=True,
    )
    step_time_budget: Number = setting(
        0.0,
        "part by which a migration may lengthen the 95th percentile of step time, 0.05 is 5 %; "
        "above it the next one has half the pace; 0: the pace is fixed",
        unit="",
        ge=0,
        le=1_000,
        live=True,
    )
