"""Measured times of aiconfigurator-core's tables, as rows of slots and microseconds.

The package (PyPI, Apache-2.0) is read where it is installed, ``pip install eplb[calibrate]``;
nothing of it is part of this project.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.fidelity.draws import Spread, drawn, even
from eplb.errors import ConfigError

PACKAGE, VERSION = "aiconfigurator-core", "0.12.0"
CARDS = {
    "a100_sxm": "a100",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "gb200": "gb200",
}
PRECISIONS = {
    "bfloat16": "bf16",
    "fp8_block": "fp8",
    "fp8": "fp8-tensor",
    "int4_wo": "int4",
    "nvfp4": "nvfp4",
    "w4a16_mxfp4": "mxfp4",
}
# The kernel of each engine that its users get, by the tables' name; others are not read.
KERNELS = {
    ("sglang", "deepepmoe"): "deepgemm",
    ("sglang", "sglang_fused_moe_triton"): "triton",
    ("sglang", "sglang_marlin_moe"): "marlin",
    ("trtllm", "wideep_compute_cutlass"): "cutlass",
    ("trtllm", "moe_torch_flow_cutlass"): "cutlass",
    ("vllm", "vllm_fp8moe_flashinfer_cutlass_flashinferexperts"): "flashinfer",
    ("vllm", "vllm_fp8moe_flashinfer_trtllm_trtllmfp8expertsmodular"): "flashinfer",
    ("vllm", "vllm_unquantizedfusedmoe_triton_tritonexperts"): "triton",
    ("vllm", "vllm_unquantizedfusedmoe_flashinfer_trtllm_trtllmbf16experts"): "flashinfer",
    ("vllm", "vllm_compressedtensorswna16marlinmoe_marlin_marlinexperts"): "marlin",
    ("vllm", "vllm_gptossmxfp4moe_triton_oaitritonmxfp4expertsmonolithic"): "triton",
}
TABLES = {
    "trtllm": ("wideep_moe_perf", "moe_perf"),
    "sglang": ("wideep_generation_moe_perf", "wideep_context_moe_perf", "moe_perf"),
    "vllm": ("moe_perf",),
}
NO_GATE = 22  # experts of a token in the one model whose experts have two matrices
DRAWS, NEAREST = 12, 3
MOST_RANKS = 32  # ranks of a group in the engines' layer tables


@dataclass(frozen=True)
class Serving:
    """What has constants of its own."""

    card: str
    engine: str
    name: str  # name of the kernel
    precision: str
    is_prefill: bool = False

    def __str__(self) -> str:
        phase = " prefill" if self.is_prefill else ""
        return f"{self.card} {self.engine} {self.name} {self.precision}{phase}"


@dataclass(frozen=True)
class Measured:
    """One row of a table."""

    serving: Serving
    table: str
    hidden: int
    intermediate: int
    spread: Spread
    us: float
    rank_tokens: float | None = None  # tokens of the measured rank, where the table has them

    @property
    def is_even(self) -> bool:
        """Whether experts were chosen in turn."""
        return not self.spread.alpha

    @property
    def rows(self) -> float:
        """Rows of a slot, mean over all slots."""
        slots = self.spread.slots or self.spread.experts
        return self.spread.tokens * self.spread.top_k / slots

    @property
    def has_all_tokens(self) -> bool:
        """Whether the measured rank was given the tokens of all ranks, which serving does not."""
        return self.table.endswith("layer") or self.serving.is_prefill

    def counts(self) -> list[NDArray[np.int64]]:
        """Rows of the measured rank's slots, in each draw."""
        if self.is_even and self.table == "sglang wide-EP":
            return [_whole_rows(self.spread)]
        if self.is_even:
            return [even(self.spread)[0]]
        if self.rank_tokens is None:
            return [counts for counts, _ in drawn(self.spread, DRAWS // 2)]
        wanted = self.rank_tokens
        found = sorted(drawn(self.spread, DRAWS), key=lambda one: abs(one[1] - wanted))
        return [counts for counts, _ in found[:NEAREST]]


def _whole_rows(spread: Spread) -> NDArray[np.int64]:
    """SGLang's even rows: whole ones of each slot; with fewer than one, one in the first slots."""
    slots = spread.experts // spread.ranks
    each = spread.tokens * spread.top_k // spread.experts
    if each:
        return np.full(slots, each)
    ours = spread.tokens * spread.top_k // spread.ranks
    return (np.arange(slots) < ours).astype(np.int64)


def package_data() -> Path:
    """Where the installed package has its tables.

    Raises:
        ConfigError: it is not installed, or of another version.
    """
    try:
        found = version(PACKAGE)
    except PackageNotFoundError as exc:
        raise ConfigError(f"{PACKAGE} is not installed, expected {VERSION}") from exc
    if found != VERSION:
        raise ConfigError(f"{PACKAGE} is {found}, expected {VERSION}: tables change their meaning")
    spec = find_spec("aiconfigurator_core")
    assert spec is not None, "its version was found"
    assert spec.origin is not None, "it is a package with an __init__"
    return Path(spec.origin).parent / "systems" / "data"


def expert_rows(data: Path, folders: Iterable[str] = CARDS) -> Iterator[Measured]:
    """All rows of experts' times that are read.

    Raises:
        ConfigError: a time that is none.
    """
    for folder in folders:
        for engine, names in TABLES.items():
            for name in names:
                yield from _newest(data / folder / "moe" / engine, name, CARDS[folder], engine)


def _newest(folder: Path, name: str, card: str, engine: str) -> Iterator[Measured]:
    """Rows of the newest version that has a kernel."""
    seen: set[Serving] = set()
    for path in sorted(folder.glob(f"*/{name}.parquet"), key=_version_of, reverse=True):
        found = [one for row in _rows_of(path) if (one := _measured(row, card, engine))]
        for one in found:
            if not 0 < one.us < np.inf:
                raise ConfigError(f"{path} has {one.us} us, expected a time above 0")
        yield from (one for one in found if one.serving not in seen)
        seen |= {one.serving for one in found}


def _rows_of(path: Path) -> list[dict[str, Any]]:
    """Rows of one rank's whole experts in a group: all even ones, and others at powers of two."""
    from pyarrow import compute, parquet  # late: an optional extra

    table = parquet.read_table(path)
    names = compute.is_in(table["kernel_source"], value_set=_array([two for _, two in KERNELS]))
    kept = compute.and_(names, compute.equal(table["moe_tp_size"], 1))
    if path.stem == "moe_perf":
        kept = compute.and_(kept, compute.less_equal(table["moe_ep_size"], MOST_RANKS))
    is_even = compute.is_in(table["distribution"], value_set=_array(["balanced", "uniform"]))
    is_power = compute.is_in(table["num_tokens"], value_set=_array([2**n for n in range(20)]))
    kept = compute.and_(kept, compute.or_(is_even, is_power))
    rows: list[dict[str, Any]] = table.filter(kept).to_pylist()
    return rows


def _array(values: list[Any]) -> Any:
    import pyarrow  # late: an optional extra

    return pyarrow.array(values)


def _version_of(path: Path) -> list[int]:
    return [int("".join(filter(str.isdigit, part)) or 0) for part in path.parent.name.split(".")]


def _measured(row: dict[str, Any], card: str, engine: str) -> Measured | None:
    ranks, experts, spread = row["moe_ep_size"], row["num_experts"], row["distribution"].split("_")
    slots = int(row["num_slots"]) if spread[-1] == "eplb" else None
    precision = PRECISIONS.get(row["moe_dtype"])
    if precision is None or experts % ranks or (slots or 0) % ranks:
        return None
    if row["topk"] == NO_GATE:
        return None
    name = KERNELS[engine, row["kernel_source"]]
    alpha = float(spread[2]) if spread[0] == "power" else 0.0
    return Measured(
        Serving(card, engine, name, precision, row["op_name"] == "moe_context"),
        f"{engine} {'wide-EP' if row['op_name'] != 'moe' else 'layer'}",
        row["hidden_size"],
        row["inter_size"],
        Spread(row["num_tokens"], experts, row["topk"], ranks, alpha, slots, "num_slots" in row),
        float(row["latency"]) * 1000,
        row.get("rank0_num_tokens"),
    )
