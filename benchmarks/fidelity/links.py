"""Times of dispatch and combine against DeepEP's: ``python -m benchmarks.fidelity.links [--fit]``.

Even load alone: no table has another one. Floors and rates of ``simulations.step_time`` are
those that ``--fit`` prints, from every second batch of DeepSeek-V3 on 1, 2, 4 and 8 nodes of 8
ranks; the other batches judge them, and other models on one node.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.fidelity.tables import package_data
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from simulations.inputs import kernel_of
from simulations.step_time import StepModel, deepep, hardware_named

RANKS_PER_NODE, SMS = 8, 20
FITTED, OTHERS = "0.5.6.post2", "0.5.12"


@dataclass(frozen=True)
class Sent:
    """One measured batch."""

    is_prefill: bool
    nodes: int
    tokens: int  # tokens of a rank
    shape: tuple[int, int, int]  # hidden, experts, top-k
    dispatch_us: float
    combine_us: float


def measured(folder: str, version: str) -> Iterator[Sent]:
    """Rows of both modes."""
    from pyarrow.parquet import read_table  # late: an optional extra

    at = package_data() / folder / "comm" / "sglang" / version
    rows: list[dict[str, Any]]
    for is_prefill, name in ((False, "ll"), (True, "normal")):
        rows = read_table(at / f"wideep_deepep_{name}_perf.parquet").to_pylist()
        for row in rows:
            if row.get("dispatch_sms", SMS) != SMS or row["num_experts"] % RANKS_PER_NODE:
                continue
            if is_prefill:
                both = [
                    row[f"{way}_transmit_us"] + row[f"{way}_notify_us"]
                    for way in ("dispatch", "combine")
                ]
            else:
                both = [row[f"{way}_avg_t_us"] for way in ("dispatch", "combine")]
            shape = row["hidden_size"], row["num_experts"], row["num_topk"]
            yield Sent(is_prefill, row["node_num"], row["num_token"], shape, *both)


def predicted(one: Sent, card: str) -> tuple[float, float]:
    """Dispatch and combine of even load, as a step has them."""
    hidden, experts, top_k = one.shape
    topology = Topology.uniform(one.nodes, RANKS_PER_NODE, 1)
    model = ModelShape((0,), experts, top_k, hidden, 2048).with_precision("fp8")
    step = StepModel(
        model,
        topology,
        hardware_named(card),
        kernel_of(model, card),
        is_prefill=one.is_prefill,
    )
    found = step.of(np.full((1, topology.num_slots), float(one.tokens * top_k)))
    return float(found.dispatch[0]), float(found.combine[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--fit", action="store_true", help="print times of few tokens and parts of rates"
    )
    is_fit = parser.parse_args().fit
    print("mode, nodes: median and p90 error of dispatch; of combine (seen | other batches)")
    rows = list(measured("h100_sxm", FITTED))
    for key in sorted({(one.is_prefill, one.nodes) for one in rows}):
        ours = sorted(
            (one for one in rows if (one.is_prefill, one.nodes) == key),
            key=lambda one: (one.tokens, one.shape),
        )
        show(f"{'normal' if key[0] else 'low latency'}, {key[1]}", ours[::2], ours[1::2])
        if is_fit:
            known = deepep(key[1], is_prefill=key[0])
            token_us = np.array(predicted(replace(ours[-1], tokens=10**6), "h100")) / 1e6
            for way, us in zip(("dispatch", "combine"), token_us, strict=True):
                floor, each = fitted_line(ours[::2], way)
                rate = getattr(known, f"{way}_rate") * us / each
                print(f"   {way}_us {floor:.1f}, {way}_rate {rate:.2f}")
    for folder, card in (("h100_sxm", "h100"), ("h200_sxm", "h200")):
        other = [one for one in measured(folder, OTHERS) if one.shape != (7168, 256, 8)]
        for is_prefill in (False, True):
            ours = [one for one in other if one.is_prefill == is_prefill]
            show(f"{card} {'normal' if is_prefill else 'low latency'}, 1, other models", ours)


def fitted_line(rows: list[Sent], way: str) -> tuple[float, float]:
    """Time of few tokens, and of each token, with the least relative error."""
    tokens = np.array([one.tokens for one in rows], dtype=np.float64)
    us = np.array([getattr(one, f"{way}_us") for one in rows])
    parts = np.stack([1 / us, tokens / us], axis=1)
    floor, each = np.linalg.lstsq(parts, np.ones(len(us)), rcond=None)[0]
    return float(floor), float(each)


def show(label: str, *parts: list[Sent]) -> None:
    """Print the errors of each part."""
    texts = []
    for part in parts:
        guess = np.array([predicted(one, "h100") for one in part])
        us = np.array([(one.dispatch_us, one.combine_us) for one in part])
        size = np.abs(guess / us - 1)
        texts.append(
            "; ".join(f"{np.median(way):4.0%} {np.quantile(way, 0.9):4.0%}" for way in size.T)
        )
    print(f"{label:<36} {' | '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
