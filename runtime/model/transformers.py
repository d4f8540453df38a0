"""A model of the ``transformers`` library whose experts are served from a rank's bank.

    schema = library_schema(model, checkpoint)      # a record is what the library's code reads
    rank = build_rank(..., checkpoint.model_shape(), schema, ...)
    prove_experts(model, rank.bank, rank.held())
    serve_experts(model, built.bank, built.table, dispatcher, rank=rank)

The rest of the model is not touched: its router chooses, its shared experts are added. The
library's own experts module computes, with its parameters replaced by the live slots, so that
activations, biases and layouts are the library's. The library is not imported here.

Shapes:  T tokens of this rank, K top-k, H hidden, E experts, C slots of this rank, n rows received.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from eplb.errors import CheckpointError, ConfigError
from runtime.checkpoints.checkpoint import Checkpoint, transformers_schema
from runtime.checkpoints.families import GATE_UP
from runtime.counters import PassCounter
from runtime.dispatch.all_to_all import Dispatcher, Received
from runtime.experts import ExpertBank, ExpertSchema
from runtime.model.moe import MoELayer
from runtime.routing import RoutingTable

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class ExpertsModule:
    """The experts of one layer in a model of the library."""

    layer: int  # the model's own number
    path: str  # dotted, from the model to the module
    module: nn.Module

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Stacked parameters [E, ...] by name."""
        return dict(self.module.named_parameters(recurse=False))


def find_experts(model: nn.Module) -> tuple[ExpertsModule, ...]:
    """Find the modules with the routed experts of a model, in the order of its layers.

    Raises:
        ConfigError: there are none, or experts are not stacked as the library stacks them.
    """
    found = []
    for path, module in model.named_modules():
        number = _LAYER.search(path)
        if number is None or not isinstance(getattr(module, GATE_UP, None), nn.Parameter):
            continue
        one = ExpertsModule(int(number[1]), path, module)
        sizes = {name: len(parameter) for name, parameter in one.parameters.items()}
        if set(sizes.values()) != {getattr(module, "num_experts", None)}:
            raise ConfigError(
                f"{path}: parameters have {sizes} experts and num_experts is "
                f"{getattr(module, 'num_experts', None)}, expected the same number everywhere"
            )
        found.append(one)
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no experts module with a parameter {GATE_UP}, "
            "expected one in each MoE layer"
        )
    return tuple(sorted(found, key=lambda one: one.layer))


def library_schema(model: nn.Module, checkpoint: Checkpoint) -> ExpertSchema:
    """Schema of records in the library's own layout, compared with a model of the library.

    Raises:
        ConfigError: the model has no experts that can be served.
        CheckpointError: the checkpoint does not fit the model.
    """
    found, schema = find_experts(model), transformers_schema(checkpoint)
    layers = tuple(one.layer for one in found)
    if layers != checkpoint.moe_layers:
        raise ConfigError(
            f"{type(model).__name__} has experts in layers {layers}, "
            f"expected {checkpoint.moe_layers} as in {checkpoint.path}"
        )
    checkpoint.check(checkpoint.model_shape(), schema)
    expected = {spec.name: (spec.shape, spec.dtype) for spec in schema.tensors}
    for one in found:
        own = {name: (tuple(p.shape[1:]), p.dtype) for name, p in one.parameters.items()}
        if own != expected:
            raise CheckpointError(
                f"{one.path}: an expert has {_listed(own)}, expected {_listed(expected)} as in "
                f"{checkpoint.path}"
            )
    return schema


def _listed(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{name} {list(size)} {kind}" for name, (size, kind) in tensors.items())


def prove_experts(model: nn.Module, bank: ExpertBank, held: Iterable[tuple[int, int, int]]) -> int:
    """Compare live slots with the model's own parameters, byte for byte; return how many.

    Args:
        model: still unmodified.
        bank: live slots, with the schema that ``library_schema`` gave.
        held: (MoE layer 0..L-1, slot of this rank, expert) of the slots to compare.

    Raises:
        ConfigError: the bank has another schema.
        CheckpointError: one differs.
    """
    found, num_compared = find_experts(model), 0
    names, own_names = set(bank.weights(0)), set(found[0].parameters)
    if names != own_names:
        raise ConfigError(
            f"expert bank: found tensors {', '.join(sorted(names))}, expected "
            f"{', '.join(sorted(own_names))} as in {found[0].path}: set model.layout to "
            '"transformers", or build it of library_schema'
        )
    for number, slot, expert in held:
        for name, parameter in found[number].parameters.items():
            live = bank.weights(number)[name][slot]
            own = parameter[expert].detach().to(live.device)
            if not torch.equal(_as_bytes(live), _as_bytes(own)):
                raise CheckpointError(
                    f"layer {found[number].layer} expert {expert}: {name} in slot {slot} differs "
                    f"from {found[number].path}, expected the same bytes"
                )
        num_compared += 1
    return num_compared


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def serve_experts(
    model: nn.Module,
    bank: ExpertBank,
    table: RoutingTable,
    dispatcher: Dispatcher,
    *,
    rank: int,
) -> PassCounter:
    """Replace the experts of a model by layers that dispatch to all ranks.

    From then on a forward pass of one rank needs a forward pass of every rank: one without requests
    runs a dummy batch. The parameters of the experts are released with their modules.

    Returns:
        The count of the model's forward passes, for engines that do not number them.

    Raises:
        ConfigError: the model has no experts that can be served.
    """
    found = find_experts(model)
    experts = LibraryExperts(found, [bank.weights(number) for number in range(bank.num_layers)])
    passes = PassCounter()
    passes.watch(model)
    for number, one in enumerate(found):
        parent, _, leaf = one.path.rpartition(".")
        top_k = 0  # the model's router has chosen already
        layer = MoELayer(number, top_k, experts, table, dispatcher)
        setattr(model.get_submodule(parent), leaf, ServedExperts(layer, passes, rank))
    return passes


class LibraryExperts:
    """Runs the library's own code on received rows; each row goes to one slot.

    The library's modules have the slots [C, ...] of each layer in place of experts [E, ...]. They
    share storage with the slots, and the modules that are given do not change.
    """

    def __init__(
        self, found: Sequence[ExpertsModule], slots: Sequence[Mapping[str, torch.Tensor]]
    ) -> None:
        self._modules: list[nn.Module] = []
        for one, tensors in zip(found, slots, strict=True):
            module = copy.copy(one.module)
            module._parameters = {
                name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()
            }
            vars(module)["num_experts"] = len(next(iter(tensors.values())))
            self._modules.append(module)

    @torch.no_grad()
    def run(self, layer: int, received: Received) -> torch.Tensor:
        """Results of grouped or padded rows."""
        rows, counts = received.rows, received.counts.to(torch.int64)
        slots = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)
        if rows.dim() == 2:
            return self._run(layer, rows, slots)
        is_filled = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
        results = torch.zeros_like(rows)
        results[is_filled] = self._run(layer, rows[is_filled], slots)
        return results

    def _run(self, layer: int, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        if not len(rows):
            return rows
        ones = torch.ones((len(rows), 1), dtype=rows.dtype, device=rows.device)
        results: torch.Tensor = self._modules[layer](rows, slots[:, None], ones)
        return results


class ServedExperts(nn.Module):
    """Takes the place of an experts module: tokens and their experts in, weighted sums out."""

    def __init__(self, layer: MoELayer, passes: PassCounter, rank: int) -> None:
        super().__init__()
        self._layer, self._passes, self._rank = layer, passes, rank

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Outputs [T, H] of tokens [T, H] routed to experts [T, K] with weights [T, K]."""
        # Other tokens in each step and on each rank, so that replicas get even shares.
        salt = self._rank + 1009 * self._passes.steps
        return self._layer.forward(hidden_states, top_k_index, top_k_weights, salt=salt)
