"""Whole MoE layers over real expert parallelism against the simulator.

    python -m benchmarks.expert_curve --out FOLDER --only deepseek-v3-fp8
    torchrun --nproc-per-node 2 -m benchmarks.serve_ranks --file R.npz --out LAYERS.npz ...
    python -m benchmarks.fidelity.own_layers --curve FOLDER/FILE --layers LAYERS.npz [--card h100]
        [--few FEW.npz]

The kernel's constants are of even rows of experts alone, and those of the links are the
simulator's own: no measured layer has a part in what is predicted, so each row judges. An eager
prefill also has a fixed time, in which the host launches and waits for counts. ``--few`` measures
it by layers of few tokens: what their median takes above the prediction is the simulator's
``other_us``. No layer of that file is judged.

    window    from the mean rows of slots over all batches, as the simulator reads load windows
    batch     from the rows of each batch: what remains is the error of kernel and links
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.routing_file import topology_of
from eplb.core.kernels import Kernel
from eplb.core.model import ModelShape
from simulations.step_time import StepModel, hardware_named, measured_kernel

NEAR = 0.1
HIDDEN, INTERMEDIATE, TOP_K = 7168, 2048, 8
Rows = NDArray[np.float64]  # [batches, L, S]


class OfBatch(Kernel):
    """A kernel whose rows are those of one batch, and no mean."""

    def mean_slot_us(self, rows: Rows, model: ModelShape) -> Rows:
        """Of slots with exactly so many rows."""
        some = self.slot_us(np.maximum(rows, 1.0), model.expert_weights, model.hidden)
        return np.where(rows > 0, some, 0.0)


def simulator(curve: Path, card: str, ranks: int, rows: Rows, *, is_prefill: bool) -> StepModel:
    """The simulator's model of layers with so many slots; one slot of nine is redundant."""
    _, num_layers, num_slots = rows.shape
    num_experts = num_slots * 8 // 9
    model = ModelShape(
        tuple(range(num_layers)), num_experts, TOP_K, hidden=HIDDEN, intermediate=INTERMEDIATE
    )
    topology = topology_of(ranks, num_experts)
    hardware, kernel = hardware_named(card), measured_kernel(curve, model)
    return StepModel(model, topology, hardware, kernel, is_prefill)


def of_window(step: StepModel, rows: Rows) -> float:
    """Microseconds of a layer by the mean rows."""
    return float(step.of(rows.mean(axis=0)).layers_us.mean())


def of_batches(step: StepModel, rows: Rows) -> float:
    """Microseconds of a layer, the median over batches of the mean over layers."""
    exact = replace(step, kernel=OfBatch(**vars(step.kernel)))
    return float(np.median([exact.of(one).layers_us.mean() for one in rows]))


WAYS: dict[str, Callable[[StepModel, Rows], float]] = {"window": of_window, "batch": of_batches}


Layer = tuple[list[str], Rows, StepModel]  # the words of its name, rows, and its model


def layers_of(path: Path, curve: Path, card: str, ranks: int) -> list[Layer]:
    """The measured layers of a file."""
    found, layers = np.load(path), list[Layer]()
    for name in found.files:
        words, rows = name.split(), found[name].astype(np.float64)
        step = simulator(curve, card, ranks, rows, is_prefill=words[0] == "prefill")
        layers.append((words, rows, step))
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--curve", type=Path, required=True)
    parser.add_argument("--layers", type=Path, nargs="+", required=True)
    parser.add_argument("--card", default="h100")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--few", type=Path, help="layers of few tokens, for the fixed time")
    asked = parser.parse_args()
    of_machine = asked.curve, asked.card, asked.ranks
    other_us = 0.0
    if asked.few:
        above = [
            float(words[-1]) - of_batches(step, rows)
            for words, rows, step in layers_of(asked.few, *of_machine)
        ]
        other_us = float(np.median(above))
        print(f"fixed time of a layer {other_us:.0f} us, {min(above):.0f} to {max(above):.0f}")
    for file in asked.layers:
        ratios = list[list[float]]()
        for (mode, tokens, trace, arm, us), rows, step in layers_of(file, *of_machine):
            whole = replace(step, other_us=other_us)
            guesses = [way(whole, rows) for way in WAYS.values()]
            ratios.append([guess / float(us) for guess in guesses])
            shown = "".join(
                f"{guess:10.1f}{ratio:6.2f}"
                for guess, ratio in zip(guesses, ratios[-1], strict=True)
            )
            print(f"{mode:8}{tokens:>6} {trace:9}{arm:12}{float(us):9.1f} us{shown}")
        for way, of_way in zip(WAYS, np.transpose(ratios), strict=True):
            near = int((np.abs(of_way - 1) <= NEAR).sum())
            print(f"{file.name}, {way}: within {NEAR:.0%}: {near} of {len(of_way)};", end=" ")
            print(f"{of_way.min():.2f} to {of_way.max():.2f}, median {np.median(of_way):.2f}")


if __name__ == "__main__":
    main()
