"""What the simulator's step model gives for the layers of ``layer_time``, beside what was measured.

The experts' curve comes from even rows. What is around them (router, choice of replicas, gathering,
weighted sum) comes from the layer without experts at other batches: a line over rows before the
experts, and one after them, as ``Transport`` has dispatch and combine. No figure of a predicted row
is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from simulations.step_time import StepModel, Transport, curve_of, hardware_named, predicted_us

NEAR = 0.10
CARD = replace(hardware_named("h200"), node_bytes_s=1e12)  # the lines below hold the true rates


@dataclass(frozen=True)
class Line:
    """One measured layer, and its prediction."""

    name: str
    skew: str
    mean_rows: int
    imbalance: float  # busiest over mean slot
    us: float
    predicted_us: float
    experts_part: float  # predicted over measured, of the experts alone
    around_part: float  # as ``experts_part``, of what is around them

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_us / self.us

    @property
    def is_near(self) -> bool:
        """Within the target."""
        return abs(self.ratio - 1) <= NEAR


def fitted_line(rows: list[float], us: list[float]) -> tuple[float, float]:
    """(us at no rows, us of a row), both 0 or more, with the least relative error."""
    system = np.array([(1.0, row) for row in rows]) / np.array(us)[:, None]
    (base, slope), _ = nnls(system, np.ones(len(rows)))
    return float(base), float(slope)


def step_model_of(record: dict[str, Any], layer: dict[str, Any]) -> StepModel:
    """The step model of a one-rank group, from what was measured apart."""
    even = {**record, **layer}
    num, hidden = int(layer["num_experts"]), int(layer["hidden"])
    rows = [float(point["tokens"] * layer["top_k"]) for point in layer["around"]]
    before = [float(point["before_us"]) for point in layer["around"]]
    after = [float(point["around_us"]) - float(point["before_us"]) for point in layer["around"]]
    dispatch_us, dispatch_row = fitted_line(rows, before)
    combine_us, combine_row = fitted_line(rows, after)
    scale = CARD.node_bytes_s / hidden / 1e6  # us of a row -> bytes of a column at the card's rate
    return StepModel(
        ModelShape((0,), num, int(layer["top_k"]), hidden, int(layer["intermediate"])),
        Topology.uniform(1, 1, num),
        CARD,
        curve_of(even, num, str(layer["model"])),
        transport=Transport(
            dispatch_us,
            combine_us,
            dispatch_bytes=dispatch_row * scale,
            combine_bytes=combine_row * scale,
        ),
    )


def lines_of(record: dict[str, Any]) -> Iterator[Line]:
    """Predictions of all measured layers."""
    for layer in record["layers"]:
        model = step_model_of(record, layer)
        for point in layer["uneven"]:
            counts = np.array([point["counts"]], dtype=np.float64)
            found = model.of(counts)
            # These are counts of one step; the step model takes means of many.
            experts = predicted_us(model.experts, point["counts"])
            around = found.us - float(found.experts[0])
            yield Line(
                f"{layer['model']} {layer['dtype']}",
                str(point["skew"]),
                int(point["mean_rows"]),
                float(counts.max() / counts.mean()),
                float(point["us"]),
                experts + around,
                experts / float(point["experts_us"]),
                around / float(point["around_us"]),
            )


def show(path: Path) -> None:
    """Print a table of a file; ``!`` marks what is off by more than 10 %.

    Raises:
        ConfigError: no file of ``layer_time``.
    """
    record = json.loads(path.read_text())
    if record.get("format") != "eplb-layer-time":
        raise ConfigError(f"{path} is no file of layer times, expected format 'eplb-layer-time'")
    lines = list(lines_of(record))
    print(f"{record['device']}, {record['software']}")
    print("| layer | skew | rows | busiest/mean | measured us | predicted | | experts | around |")
    print("|---|---|---|---|---|---|---|---|---|")
    for one in lines:
        print(
            f"| {one.name} | {one.skew} | {one.mean_rows} | {one.imbalance:.2f} | {one.us:.1f} | "
            f"{one.predicted_us:.1f} | {one.ratio:.2f}{'' if one.is_near else ' !'} | "
            f"{one.experts_part:.2f} | {one.around_part:.2f} |"
        )
    near = sum(one.is_near for one in lines)
    print(f"within {NEAR:.0%}: {near} of {len(lines)}")
