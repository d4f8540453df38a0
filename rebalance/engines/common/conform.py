"""Conformance: whether an engine moves the experts of its layers without changing one of them.

    references -> move, check, move, check, ... -> fail in between, check -> move back -> reload

Each layer is moved by the engine's own mover, several times in a row: faults of derived factors
show at the second move only. After each step all tensors that the kernels read of a slot are
compared with those of its expert at the load, and so are the outputs of the slot for fixed tokens.

The outputs are those of the engine's own kernel, one slot at a time, since a kernel's sums may
depend on the other rows of a batch. Bytes prove nothing about what a kernel takes from elsewhere:
without outputs a layer is not proved.

Ranks are forked from the process that has imported the engine, and may share a device: gloo is
between them. A module of each engine, ``rebalance.engines.ENGINE.layers``, makes the engine's own
layers of each quantisation: ``CASES`` by their names, ``subjects``, ``NOT_RUN`` with what is not
tried, and ``BACKEND`` where the engine moves experts by another one. ``subjects`` raises
``NotImplementedError`` for layers that the engine does not make here.

Shapes:  L layers, E experts, S slots of all ranks, C slots of this rank, N tokens, K hidden size.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

import eplb
from eplb.errors import ConfigError, reason_of
from rebalance.engines.common.fsck.check import (
    EngineView,
    PlacementCheck,
    References,
    agreed,
    digests_of,
)
from rebalance.engines.common.fsck.report import Fault
from rebalance.engines.common.tap import IntArray

OUTPUT = "output"  # name among the tensors of a slot
TOKENS = 16  # rows of each slot
MOVES = 3  # in a row
MOST_FAULTS = 6  # faults of a layer in a report: a factor that is left behind shows in every slot
RELOAD = "reload"  # the step that a running model is spared
Result = Literal["proved", "failed", "not proved"]
NO_KERNELS = "outputs need the engine's kernels"


@dataclass(frozen=True)
class Subject:
    """The layers of an engine on one rank. All calls but ``outputs`` are collective."""

    view: EngineView
    gather: Callable[[Any], list[Any]]  # all ranks' values, which JSON can express
    methods: dict[int, str]  # the quantisation of each layer, by the engine's numbers
    move: Callable[[IntArray], None]  # to a map [L, S], by the engine's own mover
    commit: Callable[[IntArray], None]  # a map [L, S] of weights that are there already
    outputs: Callable[[int], torch.Tensor] | None = None  # [C, N, K] of a layer, where kernels are
    interrupted: Callable[[IntArray], None] | None = None  # the same, until a transfer fails
    reload: Callable[[], None] | None = None  # the same weights, by the engine's own loader


@dataclass(frozen=True)
class LayerVerdict:
    """What was found about one layer."""

    layer: int  # by the engine's numbers
    method: str  # quantisation method
    result: Result
    tensors: tuple[str, ...]  # compared, of each slot
    step: str = ""  # the first that failed
    faults: tuple[str, ...] = ()  # the first of this step, with slot and tensor
    num_faults: int = 0  # all faults of this step
    note: str = ""  # why the layer is not proved
    reload: str = ""  # what a reload after the moves has left wrong
    trace: str = ""  # of the exception that the note names

    @property
    def may_move(self) -> bool:
        """Whether the layer may be balanced."""
        return self.result == "proved"

    def __str__(self) -> str:
        text = f"layer {self.layer} ({self.method}): {self.result}"
        if self.step:
            text += f" at {self.step}"
        return ": ".join((text, *self.faults[:1], *filter(None, [self.note])))


def prove(subject: Subject, *, num_moves: int = MOVES, seed: int = 0) -> list[LayerVerdict]:
    """Move all layers of the view, and return a verdict for each, alike on all ranks.

    The map and the weights are those of the start again, also where a step has failed, unless the
    weights were reloaded.

    Args:
        subject: the engine's layers.
        num_moves: in a row, before the one that goes back.
        seed: of the maps.
    """
    proof, view = _Proof(subject), subject.view
    first = np.stack([view.held(row) for row in view.rows])
    saved = [[tensor.to("cpu", copy=True) for tensor in view.moved(row)] for row in view.rows]
    random = np.random.default_rng(seed)

    def another() -> IntArray:
        """[L, S] a map in which no slot keeps its expert but by chance."""
        return np.stack([random.permutation(row) for row in first])

    for number in range(1, num_moves + 1):
        proof.step(f"move {number}", subject.move, another())
    if subject.interrupted is not None:
        proof.step("failed move", subject.interrupted, another())
        proof.step("move after it", subject.move, another())
    proof.step("move back", subject.move, first)
    verdicts = proof.verdicts()
    if subject.reload is not None:
        subject.move(another())
        proof.step(RELOAD, subject.reload)
        verdicts = [replace(one, reload=proof.first_of(RELOAD, one.layer)) for one in verdicts]
    if not all(one.may_move for one in verdicts):
        for row, copies in zip(view.rows, saved, strict=True):
            for tensor, copy in zip(view.moved(row), copies, strict=True):
                tensor.copy_(copy)
        subject.commit(first)
    return verdicts


class _Proof:
    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._outputs: dict[int, torch.Tensor] = {}  # [C, N, hidden] by layer, of the present step
        self._notes: dict[int, tuple[str, str]] = {}  # by layer: why it has no outputs, and a trace
        view = subject.view
        self._view = EngineView(
            view.rows, view.layer, view.held, view.rank, view.num_ranks, self._read
        )
        self._faults: dict[str, list[Fault]] = {}  # by step
        self._errors: dict[str, tuple[str, str]] = {}  # of steps, with a trace
        own = digests_of(self._view)
        self._tensors = [tuple(slots) for slots, _ in own]
        self._references, self._faults["load"] = agreed(self._view, subject.gather(own))
        for row in view.rows:
            outputs = self._references.get((row, OUTPUT), {})
            if len(set(outputs.values())) < len(outputs):
                self._notes[row] = "outputs of two experts are alike, expected others", ""

    def step(self, name: str, act: Callable[..., None], *given: Any) -> None:
        """Act, and compare all slots of all ranks with the references."""
        error, faults = ("", ""), list[Fault]()
        self._outputs.clear()
        try:
            act(*given)
            faults = all_faults(self._view, self._references)
        except Exception as exc:
            error = reason_of(exc), traceback.format_exc()
        found = self._subject.gather(([vars(fault) for fault in faults], error))
        self._faults[name] = [Fault(**one) for listed, _ in found for one in listed]
        if errors := [(reason, trace) for _, (reason, trace) in found if reason]:
            self._errors[name] = errors[0]

    def verdicts(self) -> list[LayerVerdict]:
        """One for each layer."""
        notes = self._subject.gather([[row, note] for row, note in self._notes.items()])
        note_of = {row: (why, trace) for listed in notes for row, (why, trace) in listed}
        return [
            self._verdict(row, tensors, *note_of.get(row, ("", "")))
            for row, tensors in zip(self._view.rows, self._tensors, strict=True)
        ]

    def _verdict(self, row: int, tensors: tuple[str, ...], note: str, trace: str) -> LayerVerdict:
        step = next((step for step in self._faults if self._of(step, row)), "")
        result: Result = "not proved" if note else "proved"
        if step:
            result = "failed"
        elif self._errors:
            step, (note, trace) = next(iter(self._errors.items()))
            result = "not proved"
        faults = self._of(step, row)
        return LayerVerdict(
            row,
            self._subject.methods[row],
            result,
            tensors,
            step,
            tuple(faults[:MOST_FAULTS]),
            len(faults),
            note,
            trace=trace,
        )

    def _of(self, step: str, row: int) -> list[str]:
        """The faults of a layer in a step."""
        return [str(fault) for fault in self._faults.get(step, ()) if fault.row == row]

    def first_of(self, step: str, row: int) -> str:
        """The first fault of a layer in a step, else its error."""
        error, _ = self._errors.get(step, ("", ""))
        return next(iter(self._of(step, row)), error)

    def _read(self, row: int) -> list[tuple[str, torch.Tensor]]:
        """What kernels read of a layer, and the outputs of its slots."""
        tensors = list(self._subject.view.read(row))
        if row not in self._outputs and row not in self._notes:
            try:
                self._outputs[row] = self._computed(row)
            except Exception as exc:
                self._notes[row] = reason_of(exc), traceback.format_exc()
        if row in self._outputs:
            tensors.append((OUTPUT, self._outputs[row]))
        return tensors

    def _computed(self, row: int) -> torch.Tensor:
        """[C, N, K] outputs.

        Raises:
            ConfigError: no kernel here, or one whose outputs cannot be compared.
        """
        outputs = self._subject.outputs
        if outputs is None:
            raise ConfigError(NO_KERNELS)
        first, second = outputs(row), outputs(row)
        if not torch.isfinite(first).all():
            raise ConfigError("outputs of the kernel are not finite, expected numbers")
        if not torch.equal(first, second):
            raise ConfigError("outputs of the kernel differ from call to call, expected the same")
        return first


def all_faults(view: EngineView, references: References) -> list[Fault]:
    """The faults of all slots of this rank, each once."""
    check = PlacementCheck(view, references, lambda: 0.0, math.inf)  # it waits for no time
    found = list[Fault]()
    while check.num_checked < check.num_slots:  # digests come from a device meanwhile
        found += check.visit(is_idle=True)
    return list(dict.fromkeys(found))


def report(engine: str, verdicts: Sequence[LayerVerdict], not_run: Mapping[str, str]) -> str:
    """The report for a person; ``not_run``: what this hardware does not hold, and why."""
    width = max([30, *(len(one.method) for one in verdicts)])
    lines = [engine, f"{'layer':>5}  {'quantisation':{width}} {'result':16} tensors"]
    for one in verdicts:
        tensors = ", ".join(one.tensors)
        lines.append(f"{one.layer:5}  {one.method:{width}} {one.result:16} {tensors}")
        where = f"       at {one.step}: " if one.step else "       "
        lines += [where + text for text in (*one.faults, one.note) if text]
        if one.num_faults > len(one.faults):
            lines.append(f"       and {one.num_faults - len(one.faults)} more")
        lines += [f"       after a reload: {fault}" for fault in (one.reload,) if fault]
    counts = Counter(one.result for one in verdicts)
    lines.append(", ".join(f"{counts[result]} {result}" for result in sorted(counts)))
    lines += [f"not run on this hardware: {what}: {why}" for what, why in not_run.items()]
    return "\n".join(lines)


def to_json(verdicts: Sequence[LayerVerdict]) -> str:
    """The verdicts of a rank, for the process that asked for them."""
    return json.dumps([asdict(one) for one in verdicts])


def from_json(text: str) -> list[LayerVerdict]:
    """The verdicts of ``to_json``."""
    return [
        LayerVerdict(**one | {name: tuple(one[name]) for name in ("tensors", "faults")})
        for one in json.loads(text)
    ]


RANKS, EACH, EXPERTS, LAYERS = 4, 6, 16, 2  # a case's ranks, slots of a rank, experts and layers
DEADLINE_S = 300.0  # for a rank to come to a collective of a case
# NCCL between ranks that may share a device: each is a host of its own.
SHARED_DEVICE = {
    "NCCL_HOSTID": "conform{rank}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}


def verdicts_of(
    engine: str,
    names: Sequence[str] = (),
    *,
    num_moves: int,
    seed: int,
    advance: Callable[[int], object] = lambda finished: None,
    layers: str = "",
) -> tuple[str, list[LayerVerdict], dict[str, str]]:
    """The engine and its surroundings in a line, verdicts, and what is not run here, with reasons.

    Args:
        engine: "vllm" or "sglang".
        names: of cases; none: all.
        num_moves: in a row.
        seed: of maps and weights.
        advance: gets the number of cases that are finished.
        layers: module that makes the layers; by default the engine's, which needs a CUDA device.

    Raises:
        ConfigError: the engine is not installed here, an unknown case, or no CUDA device.
    """
    device = "a CPU"
    if not layers:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else the ranks could not be forked
        if not torch.cuda.is_available():
            raise ConfigError(f"no CUDA device here, expected one: {engine}'s own kernels are run")
        device, layers = "a CUDA device", f"rebalance.engines.{engine}.layers"
    try:
        maker = import_module(layers)
    except ImportError as exc:
        raise ConfigError(
            f"{engine} cannot be imported here: {exc}, expected its environment"
        ) from exc
    for name in names:
        if name not in maker.CASES:
            raise ConfigError(f"no case {name!r}, expected one of: {', '.join(maker.CASES)}")
    found, not_run = list[LayerVerdict](), dict(maker.NOT_RUN)
    for finished, name in enumerate(names or maker.CASES, 1):
        verdicts, refusal = _of_case(layers, name, num_moves=num_moves, seed=seed)
        found += verdicts
        if refusal:
            not_run[name] = refusal
        advance(finished)
    about = (
        f"{engine} {version(engine)}, eplb {eplb.__version__}, torch {torch.__version__} on "
        f"{RANKS} ranks of {device} with gloo, {num_moves} moves in a row, seed {seed}"
    )
    return about, found, not_run


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
    if dtype == torch.int32:  # eight numbers of 4 bits
        return torch.randint(-(2**31), 2**31, tuple(shape), generator=generator, dtype=dtype)
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def _of_case(
    layers: str, name: str, *, num_moves: int, seed: int
) -> tuple[list[LayerVerdict], str]:
    """Verdicts, or why the engine does not make such layers here."""
    # A fork spares each rank the engine's import, and cannot use CUDA where its parent has.
    method = "spawn" if torch.cuda.is_initialized() else "fork"  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(  # type: ignore[no-untyped-call]
                _rank, (layers, name, num_moves, seed, Path(folder)), RANKS, start_method=method
            )
        except ProcessRaisedException as exc:
            trace = str(exc).strip()
            note = f"the engine's layer: {trace.splitlines()[-1]}"
            return [LayerVerdict(0, name, "not proved", (), note=note, trace=trace)], ""
        except ProcessExitedException as exc:
            return [LayerVerdict(0, name, "not proved", (), note=f"a rank ended: {exc}")], ""
        if (refusal := Path(folder, "refusal")).exists():
            return [], refusal.read_text(encoding="utf-8")
        return from_json(Path(folder, "verdicts").read_text(encoding="utf-8")), ""


def _rank(rank: int, layers: str, name: str, num_moves: int, seed: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update({name: value.format(rank=rank) for name, value in SHARED_DEVICE.items()})
    maker = import_module(layers)
    dist.init_process_group(
        getattr(maker, "BACKEND", "gloo"),
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    together = dist.new_group(backend="gloo")
    subjects = maker.subjects(rank, name, seed)
    try:
        verdicts = [one for made in subjects for one in prove(made, num_moves=num_moves, seed=seed)]
        if rank == 0:
            Path(folder, "verdicts").write_text(to_json(verdicts), encoding="utf-8")
    except NotImplementedError as exc:  # alike on all ranks
        if rank == 0:
            Path(folder, "refusal").write_text(reason_of(exc), encoding="utf-8")
    dist.barrier(together)  # a rank that ends while another one still connects would fail it
