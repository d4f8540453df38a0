"""Description of a model family's checkpoints: data that one reader takes.

Names are templates. A layer's prefix has ``{layer}``, the model's own number, and for layers of
multi-token prediction (MTP) ``{mtp}``, counted from 0. An expert's name has ``{expert}`` where each
expert has tensors of its own; else the experts are the first dimension of one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

GATE, UP, DOWN, GATE_UP = "gate_proj", "up_proj", "down_proj", "gate_up_proj"

# After a projection's name: the matrix, its scales, its bias. Quantised tensors are carried as they
# are, so a suffix needs no meaning here, but an unknown one would be left behind without an error.
SUFFIXES = (
    ".weight",
    ".bias",
    ".weight_scale_inv",  # FP8 with 128 x 128 blocks; W4A8
    ".weight_scale",  # FP8 or INT8 by tensor or channel; NVFP4 and MXFP4 by block
    ".weight_scale_2",  # NVFP4, by tensor
    ".weight_global_scale",  # NVFP4 of compressed-tensors
    ".weight_offset",  # INT8 and W4A8 of Ascend
    ".weight_scale_second",
    ".weight_offset_second",
    ".scale_bias",
    ".weight_packed",  # INT4 and NVFP4 of compressed-tensors
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".scale",  # DeepSeek-V4: FP4 by block of 32, FP8 by block of 128
    ".qweight",  # GPTQ and AWQ
    ".qzeros",
    ".scales",
    ".g_idx",
)
STACKED_SUFFIXES = (
    "",
    "_bias",
    "_blocks",  # MXFP4 of gpt-oss
    "_scales",
    "_scale",
    "_scale_inv",
    "_scale_2",
    "_weight_scale",
    "_weight_scale_2",
    "_weight_scale_inv",
    "_input_scale",
    *SUFFIXES,
)


class Rule(Enum):
    """How the value of a key in config.json says which layers have routed experts."""

    FROM = "layers from this number on"
    EVERY = "layers divisible by this number; or a list of 0 and 1, one for each layer"
    EVERY_NTH = "every n-th layer: n - 1, 2n - 1, ..."
    NOT_IN = "all but the listed layers"
    ONLY_IN = "the listed layers; a list, or numbers apart by commas"
    TYPES = 'a type for each layer; "dense" has none'


@dataclass(frozen=True)
class ConfigKeys:
    """Keys of config.json; the first of each tuple that is there counts.

    A layer has routed experts where every rule whose key is there says so.
    """

    num_experts: tuple[str, ...]
    intermediate: tuple[str, ...]  # width of one routed expert
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    hidden: tuple[str, ...] = ("hidden_size",)
    num_layers: tuple[str, ...] = ("num_hidden_layers",)
    moe_layers: tuple[tuple[Rule, str], ...] = ()
    num_groups: tuple[str, ...] = ()
    num_shared: tuple[str, ...] = ()
    num_zero: tuple[str, ...] = ()  # experts without computation: they take no slot and no bytes


@dataclass(frozen=True)
class ExpertLayout:
    """How the projections of routed experts are stored.

    ``gate`` and ``up``, or ``gate_up`` with both; the parts of a record are named by projection and
    suffix: ``gate_proj.weight``, ``gate_up_proj_blocks``.
    """

    down: str
    gate: str = ""
    up: str = ""
    gate_up: str = ""
    is_transposed: bool = False  # plain matrices are [in, out], not [out, in]
    is_interleaved: bool = False  # outputs of gate and up alternate, else all of gate come first

    @property
    def is_stacked(self) -> bool:
        """Whether experts are the first dimension of one tensor."""
        return "{expert}" not in self.down

    @property
    def names(self) -> dict[str, str]:
        """Template of each projection, below the layer's prefix."""
        named = {GATE: self.gate, UP: self.up, GATE_UP: self.gate_up, DOWN: self.down}
        return {projection: name for projection, name in named.items() if name}

    @property
    def suffixes(self) -> tuple[str, ...]:
        """What may follow a projection's name."""
        return STACKED_SUFFIXES if self.is_stacked else SUFFIXES


@dataclass(frozen=True)
class Family:
    """One model family: how it is recognised, and where its experts lie."""

    name: str
    model_types: tuple[str, ...]  # as config.json names them
    architectures: tuple[str, ...]  # where the model type is not known
    keys: ConfigKeys
    layers: tuple[str, ...]  # prefixes of a layer; the first that the index has
    layouts: tuple[ExpertLayout, ...]  # the first that the index has
    router: tuple[tuple[str, str], ...]  # role -> name below the layer's prefix
    shared: tuple[str, ...] = ()  # names of the shared expert's tensors, below the layer's prefix
    mtp_layers: tuple[str, ...] = ()  # prefixes of MTP layers, if they have routed experts
    sections: tuple[str, ...] = ()  # parts of config.json; the first that is there has the keys
    unproven: str = ""  # why no test compares it with the family's own code


def separate(
    experts: str = "mlp.experts", gate: str = GATE, up: str = UP, down: str = DOWN
) -> ExpertLayout:
    """Three tensors for each expert."""
    each = f"{experts}.{{expert}}"
    return ExpertLayout(gate=f"{each}.{gate}", up=f"{each}.{up}", down=f"{each}.{down}")


def shared_names(expert: str, parts: tuple[str, ...] = (GATE, UP, DOWN)) -> tuple[str, ...]:
    """Names of a shared expert's matrices."""
    return tuple(f"{expert}.{part}.weight" for part in parts)
