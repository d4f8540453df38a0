"""Layouts of an expert's record, made of the checkpoint alone.

Which tensors a record has is decided by the code that computes with the live slots. The parts of
this project that do so take ``ExpertSchema.swiglu``; the modules of the ``transformers`` library
take what is made here, without the library.
"""

from __future__ import annotations

from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.description import DOWN, GATE, GATE_UP, UP
from runtime.experts import ExpertSchema, TensorSpec

# Parts of a checkpoint with a tensor for each matrix, of which the library stacks its parameters.
_STACKED_OF = {
    GATE_UP: (f"{GATE}.weight", f"{UP}.weight"),
    DOWN: (f"{DOWN}.weight",),
}


def transformers_schema(checkpoint: Checkpoint) -> ExpertSchema:
    """Schema of records as the experts modules of the ``transformers`` library read them.

    A checkpoint that has the library's parameters (gpt-oss, with biases) is taken as it is stored.
    Of one with a tensor for each matrix, gate and up are stacked, as the library does at loading.

    Raises:
        CheckpointError: a matrix is missing: the weights are quantised in a way of their own.
    """
    stored = checkpoint.schema()
    if GATE_UP in {spec.name for spec in stored.tensors}:
        return stored
    layer, specs = checkpoint.moe_layers[0], list[TensorSpec]()
    for name, parts in _STACKED_OF.items():
        first = checkpoint.part(layer, 0, parts[0])
        shape = (len(parts) * first.shape[0], *first.shape[1:])
        specs.append(TensorSpec(name, shape, first.dtype, parts))
    return ExpertSchema(tuple(specs))
