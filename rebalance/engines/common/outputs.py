"""What a slot computes for fixed tokens, from the operands that the engine's kernel is given.

A CPU has none of the kernels, and a kernel's sums may depend on the other rows of a batch. So the
outputs are computed here, one slot at a time, with the weights, scales and factors as they stand
where the kernel reads them: those that a move has left behind change the output.

Shapes:  N tokens, K hidden size, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eplb.errors import ConfigError

OUTPUT = "output"  # name among the tensors of a slot
TOKENS = 4
NIBBLES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
E8M0_BIAS = 127


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix of one expert, and what it is multiplied with."""

    weight: torch.Tensor  # [rows, columns], or two numbers of 4 bits in a byte
    scale: torch.Tensor | None = None  # of a matrix, a row, a block or a group; exponents in uint8
    factor: torch.Tensor | None = None  # one number
    bias: torch.Tensor | None = None  # [rows]


@dataclass(frozen=True)
class Operands:
    """What the kernel reads of one slot."""

    w13: Matrix  # [2 I, K] gate and up
    w2: Matrix  # [K, I]
    inputs: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)  # factors of activations


def output_of(one: Operands) -> torch.Tensor:
    """[N, K] what the slot gives for fixed tokens.

    Raises:
        ConfigError: a layout that is not known here.
    """
    w13, w2 = dense(one.w13), dense(one.w2)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(TOKENS, w13.shape[1], generator=generator).to(w13.device)
    first, second = (1.0 if it is None else it.float().reshape(-1)[:1] for it in one.inputs)
    gate, up = _with_bias(tokens * first @ w13.T, one.w13).chunk(2, dim=1)
    return _with_bias(torch.nn.functional.silu(gate) * up * second @ w2.T, one.w2)


def _with_bias(sums: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    return sums if matrix.bias is None else sums + matrix.bias.float()


def dense(matrix: Matrix) -> torch.Tensor:
    """[rows, columns] the numbers of a matrix.

    Raises:
        ConfigError: a layout that is not known here.
    """
    weight = matrix.weight
    if weight.dim() != 2 or weight.dtype in (torch.int32, torch.int64):
        raise ConfigError(
            f"a weight is {weight.dtype} of shape {tuple(weight.shape)}, expected [rows, columns]"
        )
    if weight.dtype == torch.uint8:
        pairs = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(1)
        found = NIBBLES.to(weight.device)[pairs.long()]
    else:
        found = weight.float()
    if matrix.scale is not None:
        found = found * _spread(matrix.scale, found.shape)
    return found if matrix.factor is None else found * matrix.factor.float().reshape(-1)[0]


def _spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A number for each of a matrix, or one for several, in the shape of the matrix."""
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.float() - E8M0_BIAS)
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.numel() == shape[0]:
        return scale.reshape(-1, 1)
    is_finer = scale.dim() == 2 and any(map(int.__lt__, shape, scale.shape))
    if scale.dim() != 2 or is_finer:
        raise ConfigError(f"scales of shape {tuple(scale.shape)} for {tuple(shape)} numbers")
    for dim, (size, parts) in enumerate(zip(shape, scale.shape, strict=True)):
        scale = scale.repeat_interleave(-(-size // parts), dim=dim).narrow(dim, 0, size)
    return scale
