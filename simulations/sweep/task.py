"""Runs one task of a sweep: replays its configuration, and gives one row of the table."""

from __future__ import annotations

from eplb.core.dispatch import DispatchRule
from eplb.core.model import preset
from eplb.errors import ConfigError
from simulations.cost.migration import MigrationCost
from simulations.inputs import even_topology, model_of, step_model_of
from simulations.peers import register_peers
from simulations.replay import Scenario, replay_all
from simulations.report import summary
from simulations.sweep.grid import Task, software
from simulations.sweep.load import Load
from simulations.sweep.results import Row


def run_task(load: Load, task: Task) -> Row:
    """Replay a configuration.

    Raises:
        ConfigError: a host with other software, or a configuration that cannot be.
        HistoryError: load that cannot be replayed.
    """
    register_peers()
    scenario = _scenario(load, task)
    replays = replay_all(scenario, [task.policy])
    result = summary(task.settings.load, scenario, replays)
    figures = result["policies"][task.policy]
    return Row(
        task=task.digest,
        load=task.settings.load,
        model=task.settings.model,
        hardware=task.settings.hardware,
        ranks=task.ranks,
        nodes=result["nodes"],
        slots=result["slots"],
        redundant=task.redundant,
        interval=task.interval,
        policy=task.policy,
        dispatch=task.dispatch,
        seed=task.seed,
        windows=result["windows"],
        windows_skipped=result["windows_skipped"],
        windows_idle=result["windows_idle"],
        noise_floor=result["noise_floor"],
        failed=figures["failed"],
        imbalance_mean=figures.get("imbalance_mean"),
        imbalance_p95=figures.get("imbalance_p95"),
        imbalance_p99=figures.get("imbalance_p99"),
        imbalance_max_layer=figures.get("imbalance_max_layer"),
        rebalances=figures.get("rebalances", 0),
        kept=figures.get("kept", 0),
        experts_moved=figures.get("experts_moved", 0),
        bytes_moved=sum(figures.get("bytes_by_link", {}).values()),
        step_us_mean=figures.get("step_us_mean"),
        lost_s=figures.get("lost_s"),
        tokens_per_s_per_rank=figures.get("tokens_per_s_per_rank"),
    )


def _scenario(load: Load, task: Task) -> Scenario:
    settings = task.settings
    if software() != settings.software:
        raise ConfigError(
            "this worker runs other software than the command that started the sweep: expected "
            "the same version of eplb, numpy, scipy, numba and ortools on all hosts"
        )
    model = preset(settings.model) if settings.model is not None else None
    if model is not None and settings.precision is not None:
        model = model.with_precision(settings.precision)
    windows = load.windows(task.seed, model)
    fitted = model_of(model, windows)
    topology = even_topology(
        task.ranks, settings.ranks_per_node, task.redundant, windows.num_experts
    )
    step_model = price = None
    if settings.hardware is not None:
        step_model = step_model_of(
            fitted,
            topology,
            settings.hardware,
            is_prefill=settings.is_prefill,
            other_us=settings.other_us,
            is_overlapped=settings.is_overlapped,
        )
        price = MigrationCost(step_model.model, step_model.hardware)
    return Scenario(
        topology,
        fitted,
        load=windows,
        seed=task.seed,
        past_windows=settings.past_windows,
        plan_every=task.interval,
        dispatch=DispatchRule(task.dispatch),
        step_model=step_model,
        migration=price,
    )
