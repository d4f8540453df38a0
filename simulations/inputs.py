"""What commands name: windows by a file or a generator, ranks by counts, times by hardware."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from eplb.core.kernels import Kernel, kernel_for
from eplb.core.load import LoadHistory
from eplb.core.model import PRESETS, ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError, HistoryError, counted
from simulations.batches import batched_windows, read_requests
from simulations.step_time import StepModel, hardware_named, measured_kernel
from simulations.windows import RecordedDeployment, WindowSeries, of_history
from simulations.workloads import PREFIX, windows_named
from telemetry.formats.model_config import model_by_name
from telemetry.formats.routing import window_of
from telemetry.formats.table import read_load
from telemetry.formats.types import ReadOptions


def windows_of(
    trace: str,
    options: ReadOptions,
    seed: int,
    model: ModelShape | None = None,
    batch: int | None = None,
    name: str | None = None,
) -> WindowSeries:
    """The windows of a trace, a dump or a store, or generated ones.

    Args:
        trace: see docs/engines.md, or ``generated:NAME:key=value,...``.
        model: gives the shape of generated windows where ``trace`` does not.
        batch: recorded requests that run at once.
        name: of the format; None: detected.

    Raises:
        ConfigError: options that the source does not take.
        HistoryError: a file that cannot be read.
    """
    if trace.startswith(PREFIX):
        of_files = replace(options, max_windows=1, deployment="", num_hidden=None)
        if of_files != ReadOptions(max_windows=1, deployment="") or (batch, name) != (None, None):
            raise ConfigError(
                "--window-tokens, --experts, --layer-ids, --first-moe-layer, --num-layers, "
                "--top-k, --layout, --batch, --format and --strict are for trace files, expected "
                f"{PREFIX}NAME:key=value"
            )
        return windows_named(trace, seed, model)
    if batch is not None:
        return _batched(Path(trace), options, batch)
    found = read_load(trace, options, name)
    recorded_on = RecordedDeployment(found.shape, found.num_ranks, found.num_nodes, found.window_s)
    busy, notes = busy_windows(found.history, trace)
    return replace(of_history(busy), notes=(*found.notes, *notes), deployment=recorded_on)


def check_steps(windows: WindowSeries, trace: str, steps: int | None) -> None:
    """Refuse times of a recorded load that does not tell how many steps a window has.

    Raises:
        ConfigError: neither the load nor the option tells.
    """
    if steps is None and windows.steps == 1 and not trace.startswith(PREFIX):
        raise ConfigError(
            f"{trace} does not tell the forward passes of a window, which times of steps need: "
            "expected --steps (1: each window is one step)"
        )


def busy_windows(history: LoadHistory, source: str) -> tuple[LoadHistory, tuple[str, ...]]:
    """The windows with tokens, and a note on those without any.

    An idle window has imbalance 1.0 under every placement, so it would hide that of the others.

    Args:
        history: windows of a recording.
        source: its name, for the refusal.

    Raises:
        HistoryError: no window has tokens.
    """
    routed = history.tokens.sum(axis=2)  # [T, L]
    busy = routed.any(axis=1)
    total = counted(history.num_windows, "window")
    if not busy.any():
        raise HistoryError(
            f"{source}: all counts of its {total} are 0, as an engine writes them before it "
            "serves; expected recorded traffic"
        )
    notes = []
    if not busy.all():
        num_idle = int(np.count_nonzero(~busy))
        notes.append(f"{num_idle} of {total} have no tokens and are left out")
        history = history.of_windows(np.flatnonzero(busy))
    return history, tuple(notes)


def _batched(path: Path, options: ReadOptions, batch: int) -> WindowSeries:
    """Steps of a batch of the requests of a file, or of a folder of vLLM's, a file each."""
    ids, lengths, notes = read_requests(path, layout=options.layout)
    tokens = options.window_tokens or window_of(ids.shape[1])
    windows = of_history(batched_windows(path, ids, lengths, batch, tokens, options.num_experts))
    return replace(windows, notes=notes)


def topology_of(ranks: int, nodes: int, slots: int | None, num_experts: int) -> Topology:
    """Spread slots over ranks and ranks over nodes as evenly as they go.

    Args:
        slots: of a layer, all ranks together; None: a quarter more than experts.

    Raises:
        ConfigError: more nodes than ranks.
    """
    if not 1 <= nodes <= ranks:
        raise ConfigError(f"{ranks} ranks on {nodes} nodes, expected 1 <= nodes <= ranks")
    if slots is None:
        slots = -(-num_experts * 5 // (4 * ranks)) * ranks
    slots_of_rank = np.full(ranks, slots // ranks, dtype=np.int32)
    slots_of_rank[: slots % ranks] += 1
    node_of_rank = np.arange(ranks, dtype=np.int32) * nodes // ranks
    return Topology(node_of_rank, slots_of_rank)


def even_topology(ranks: int, ranks_per_node: int, redundant: int, num_experts: int) -> Topology:
    """Ranks with the fewest equal slots that hold all experts, and redundant ones on each.

    Args:
        ranks_per_node: at most; nodes that are not full have as many ranks as each other.
        redundant: slots of each rank.
    """
    slots = -(-num_experts // ranks) + redundant
    return topology_of(ranks, -(-ranks // ranks_per_node), slots * ranks, num_experts)


def model_named(name: str | None, windows: WindowSeries) -> tuple[ModelShape, str]:
    """The model by its name, else that of the source, else the only known one of this shape.

    Returns:
        The model, and where it is from.

    Raises:
        ConfigError: no known model has this shape, or several have.
    """
    if name is not None:
        return model_by_name(name), f"{name}, as asked for"
    shape = f"{windows.num_layers} MoE layers x {windows.num_experts} experts"
    if (described := windows.deployment.model) is not None:
        return described, f"{shape}, as the store describes it"
    alike = {
        known: one
        for known, one in PRESETS.items()
        if (one.num_layers, one.num_experts) == (windows.num_layers, windows.num_experts)
    }
    # Several names may be one shape: DeepSeek-V3 and R1.
    if len({id(one) for one in alike.values()}) != 1:
        raise ConfigError(
            f"the load has {shape}, which {'several' if alike else 'no'} known models have, "
            "expected --model with the model's config.json, or one of: "
            f"{', '.join(sorted(alike or PRESETS))}"
        )
    found = next(iter(alike))
    return alike[found], f"{found}, the known model of {shape}"


def model_of(
    model: ModelShape | None, windows: WindowSeries | LoadHistory, trace: str
) -> ModelShape | None:
    """The model, if the windows of a trace are of its shape.

    Raises:
        ConfigError: they are not.
    """
    found = (windows.num_layers, windows.num_experts)
    if model is not None and found != (model.num_layers, model.num_experts):
        raise ConfigError(
            f"{trace} has {found[0]} MoE layers x {found[1]} experts, the model "
            f"{model.num_layers} x {model.num_experts}: expected the load of that model, or "
            "--model with the one that was recorded"
        )
    return model


def kernel_of(
    model: ModelShape,
    hardware: str,
    *,
    engine: str | None = None,
    expert_times: Path | None = None,
    is_prefill: bool = False,
) -> Kernel:
    """The kernel of a measured file, else an engine's by its constants.

    Raises:
        ConfigError: no constants, or a file of other experts.
    """
    if expert_times is not None:
        return measured_kernel(expert_times, model)
    card = hardware_named(hardware).name
    return kernel_for(card, model.precision, engine, is_prefill=is_prefill)


def step_model_of(
    model: ModelShape | None,
    topology: Topology,
    hardware: str,
    expert_times: Path | None = None,
    *,
    engine: str | None = None,
    is_prefill: bool = False,
    other_us: float = 0.0,
    is_overlapped: bool = False,
    port_ranks: int = 1,
) -> StepModel:
    """Times of steps of a card.

    Raises:
        ConfigError: no model, unknown hardware, or as ``kernel_of``.
    """
    if model is None:
        raise ConfigError("times of steps need the sizes of experts, expected --model")
    card = replace(hardware_named(hardware), port_ranks=port_ranks)
    kernel = kernel_of(
        model, hardware, engine=engine, expert_times=expert_times, is_prefill=is_prefill
    )
    return StepModel(model, topology, card, kernel, is_prefill, other_us, is_overlapped)
