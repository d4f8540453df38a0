"""``eplb conform``: an engine's own layers of each quantisation, in ranks of this host's CPU.

The ranks are forked from the process that has imported the engine. A module of each engine,
``rebalance.engines.ENGINE.bench``, makes the layers: ``CASES`` by their names, ``subjects``, and in
``NOT_RUN`` what a CPU does not hold.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes

import eplb
from eplb.errors import ConfigError
from rebalance.engines.common.conform import LayerVerdict, from_json, prove, to_json

RANKS, EACH, EXPERTS, LAYERS = 4, 6, 16, 2  # a case's ranks, slots of a rank, experts and layers
DEADLINE_S = 600.0  # for a rank to come to a collective of a case


def verdicts_of(
    engine: str, names: Sequence[str] = (), *, num_moves: int, seed: int
) -> tuple[str, list[LayerVerdict], dict[str, str]]:
    """The engine and its surroundings in a line, verdicts, and what is not run here, with reasons.

    Args:
        engine: "vllm" or "sglang".
        names: of cases; none: all.
        num_moves: in a row.
        seed: of maps and weights.

    Raises:
        ConfigError: the engine is not installed here, or an unknown case.
    """
    try:
        bench = import_module(f"rebalance.engines.{engine}.bench")
    except ImportError as exc:
        raise ConfigError(
            f"{engine} cannot be imported here: {exc}, expected its environment"
        ) from exc
    for name in names:
        if name not in bench.CASES:
            raise ConfigError(f"no case {name!r}, expected one of: {', '.join(bench.CASES)}")
    found = [
        verdict
        for name in names or bench.CASES
        for verdict in _of_case(engine, name, num_moves=num_moves, seed=seed)
    ]
    about = (
        f"{engine} {version(engine)}, eplb {eplb.__version__}, torch {torch.__version__} on "
        f"{RANKS} ranks of a CPU with gloo, {num_moves} moves in a row, seed {seed}"
    )
    return about, found, bench.NOT_RUN


def drawn(name: str, shape: Sequence[int], dtype: torch.dtype, *salt: object) -> torch.Tensor:
    """Random numbers of a tensor in a checkpoint; another salt gives others."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr((name, salt)).encode()))
    if dtype == torch.uint8:
        # Exponents of MXFP4 about 1, and any two numbers of 4 bits.
        ends = (118, 124) if "scale" in name else (0, 256)
        return torch.randint(*ends, tuple(shape), generator=generator, dtype=dtype)
    if "scale" in name:
        return (0.01 + 0.02 * torch.rand(tuple(shape), generator=generator)).to(dtype)
    if dtype == torch.int8:
        return torch.randint(-127, 128, tuple(shape), generator=generator, dtype=dtype)
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def _of_case(engine: str, name: str, *, num_moves: int, seed: int) -> list[LayerVerdict]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "verdicts")
        try:
            start_processes(  # type: ignore[no-untyped-call]
                _rank, (engine, name, num_moves, seed, result), RANKS, start_method="fork"
            )
        except ProcessRaisedException as exc:
            reason = str(exc).strip().splitlines()[-1]
            return [LayerVerdict(0, name, "not proved", (), note=f"the engine's layer: {reason}")]
        return from_json(result.read_text(encoding="utf-8"))


def _rank(rank: int, engine: str, name: str, num_moves: int, seed: int, result: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{result.with_name('rendezvous')}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    subjects = import_module(f"rebalance.engines.{engine}.bench").subjects(rank, name, seed)
    verdicts = [one for found in subjects for one in prove(found, num_moves=num_moves, seed=seed)]
    if rank == 0:
        result.write_text(to_json(verdicts), encoding="utf-8")
    dist.barrier()  # a rank that ends while another one still connects would fail it
