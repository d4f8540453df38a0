"""The layers of ``rebalance.engines.vllm.layers`` on a CPU, which has none of their kernels.

What only a GPU has is replaced: the check whether a kernel runs here, one conversion to FP8, and
what the balancer takes from an accelerator. Layers have the layout of the back end that a case
names. No kernel of vLLM runs, so nothing has outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as kernels
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe.experts import ocp_mx_emulation_moe
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a8_mxfp4 import (  # noqa: E501
    CompressedTensorsW4A8Mxfp4MoEMethod,
)

from rebalance.engines.common.conform import Subject
from rebalance.engines.vllm import layers
from rebalance.engines.vllm.layers import Case, MethodConfig
from tests.support.engines import vllm_cpu

CPU = torch.device("cpu")


def of(name: str, back_end: str) -> Case:
    return Case(layers.CASES[name].quantisation, back_end)


CASES = {
    "bf16": of("bf16", "triton"),
    "fp8 tensor": of("fp8 tensor", "triton"),
    "fp8 block": of("fp8 block", "triton"),
    "nvfp4 swizzled": of("nvfp4", "cutlass"),
    "nvfp4 linear": of("nvfp4", "emulation"),
    "mxfp4": of("mxfp4", "emulation"),
    "int8": of("int8", "triton"),
    "w4a16": of("w4a16", "marlin"),
    "w4a16 triton": of("w4a16", "triton"),
    "w4a8 mxfp4": Case(lambda: MethodConfig(CompressedTensorsW4A8Mxfp4MoEMethod), "emulation"),
}
NOT_RUN = {"sleep and wake-up": "vLLM's allocator needs a GPU"}


def subjects(rank: int, name: str, seed: int) -> Iterator[Subject]:
    """The layers of a case on one rank and those of a drafter; collective."""
    with layers.configured(CASES[name], CPU), layers.groups(rank, CPU):
        for subject, _ in layers.subjects_of(*_models(CASES[name], seed)):
            yield subject


def made(rank: int, name: str, seed: int) -> tuple[Any, Any, Any, Callable[[], None]]:
    """What vLLM's balancer has of a case's drafter, then of its target; the ranks, and a reload.

    Collective.
    """
    kept.enter_context(layers.configured(CASES[name], CPU))
    kept.enter_context(layers.groups(rank, CPU))
    draft, target, reload = _models(CASES[name], seed)
    return draft, target, parallel_state.get_eplb_group(), reload


kept = ExitStack()  # of a process in which layers were made


def _models(case: Case, seed: int) -> tuple[Any, Any, Callable[[], None]]:
    vllm_cpu.install(parallel_state.get_ep_group(), parallel_state.get_eplb_group())
    _replace_kernels()
    draft, target, reload = layers.made(case, seed, CPU)
    for model_state in (draft, target):
        model_state.communicator.set_stream(vllm_cpu.Stream())
    return draft, target, reload


def _replace_kernels() -> None:
    """What the making of a layer asks of a GPU."""
    unquantized._get_priority_backends = lambda config: [unquantized.UnquantizedMoeBackend.TRITON]
    for cls in (kernels.FusedMoEExperts, *ocp_experts()):
        cls.is_supported_config = staticmethod(lambda *given: (True, None))
    torch.Tensor.cuda = lambda tensor, *given, **named: tensor  # type: ignore[method-assign]
    if not hasattr(torch.ops._C, "static_scaled_fp8_quant"):
        library: Any = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
        library.define(
            "static_scaled_fp8_quant(Tensor(a!) out, Tensor x, Tensor s, int[]? g=None) -> ()"
        )
        library.impl("static_scaled_fp8_quant", _to_fp8, "CPU")
        _libraries.append(library)


_libraries: list[Any] = []  # an operator lives as long as its library


def ocp_experts() -> Iterator[type]:
    """Classes of the emulation of MX formats, which ask for a package of a GPU's vendor."""
    for value in vars(ocp_mx_emulation_moe).values():
        if isinstance(value, type) and issubclass(value, kernels.FusedMoEExperts):
            yield value


def _to_fp8(out: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, group: Any = None) -> None:
    out.copy_((x.float() / scale).clamp(-448, 448).to(out.dtype))
