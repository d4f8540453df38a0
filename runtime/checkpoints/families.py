"""The model families, and which of them a config.json belongs to.

A family is a row: its name, model types and architectures (one string each, apart by blanks), and
where it differs from the family that it is made of. Its description is data that one reader takes.

Names are templates. A layer's prefix has ``{layer}``, the model's own number, and for layers of
multi-token prediction (MTP) ``{mtp}``, counted from 0. An expert's name has ``{expert}`` where each
expert has tensors of its own; else the experts are the first dimension of one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eplb.core.model_config import ConfigKeys, Rule
from eplb.errors import CheckpointError, ConfigError

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


def _alike(
    family: Family, name: str, model_types: str, architectures: str = "", **differences: Any
) -> Family:
    """A family with other names than ``family`` and the given differences; proven if not stated."""
    return replace(
        family,
        name=name,
        model_types=tuple(model_types.split()),
        architectures=tuple(architectures.split()),
        **({"unproven": ""} | differences),
    )


def _keys(num_experts: str, intermediate: str, **others: Any) -> ConfigKeys:
    """Keys of config.json, apart by blanks; rules for layers as they are."""
    tuples = {k: v.split() if isinstance(v, str) else v for k, v in others.items()}
    return ConfigKeys(
        tuple(num_experts.split()),
        tuple(intermediate.split()),
        **{name: tuple(value) for name, value in tuples.items()},
    )


def _router(weight: str, correction_bias: str = "") -> tuple[tuple[str, str], ...]:
    both = ("weight", weight), ("correction_bias", correction_bias)
    return both if correction_bias else both[:1]


_LAYER = "model.layers.{layer}"
_IN_VISION_MODEL = ("language_model.model.layers.{layer}", _LAYER)
_MTP = ("mtp.layers.{mtp}",)
_TEXT = ("text_config",)
_DENSE_FIRST = (
    (Rule.FROM, "first_k_dense_replace"),
    (Rule.EVERY, "moe_layer_freq"),
    (Rule.TYPES, "mlp_layer_types"),
)
_PLAIN = Family(
    name="",
    model_types=(),
    architectures=(),
    keys=_keys("num_experts", "intermediate_size"),
    layers=(_LAYER,),
    layouts=(separate(),),
    router=_router("mlp.gate.weight"),
)

# DeepSeek and the families that kept its layout: Kimi, GLM, Ling, DeepSeek-OCR.
DEEPSEEK_V2 = _alike(
    _PLAIN,
    "DeepSeek-V2",
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    keys=_keys(
        "n_routed_experts num_local_experts",
        "moe_intermediate_size",
        moe_layers=_DENSE_FIRST,
        num_groups="n_group",
        num_shared="n_shared_experts",
    ),
    shared=shared_names("mlp.shared_experts"),
)
DEEPSEEK_V3 = _alike(
    DEEPSEEK_V2,
    "DeepSeek-V3, R1",
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    router=_router("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    mtp_layers=(_LAYER,),
)
DEEPSEEK_V4 = _alike(
    DEEPSEEK_V2,
    "DeepSeek-V4",
    "deepseek_v4",
    "DeepseekV4ForCausalLM",
    layers=("layers.{layer}", _LAYER),
    layouts=(separate("ffn.experts", "w1", "w3", "w2"),),
    router=(
        *_router("ffn.gate.weight", "ffn.gate.bias"),
        ("token_table", "ffn.gate.tid2eid"),  # in layers whose experts follow from the token id
    ),
    shared=shared_names("ffn.shared_experts", ("w1", "w3", "w2")),
    mtp_layers=("mtp.{mtp}",),
)
DEEPSEEK_OCR2 = _alike(
    DEEPSEEK_V2,
    "DeepSeek-OCR-2",
    "deepseek_ocr2",
    "DeepseekOcr2ForConditionalGeneration DeepseekOCR2ForCausalLM",
    sections=("text_config", "language_config"),
)
LING_HYBRID = _alike(
    DEEPSEEK_V3,
    "Ling 3.0",
    "bailing_hybrid",
    "BailingMoeV3ForCausalLM BailingHybridForCausalLM",
    keys=_keys(
        "num_experts num_local_experts",
        "moe_intermediate_size",
        top_k="num_experts_per_tok num_experts_per_token",
        moe_layers=_DENSE_FIRST,
        num_groups="n_group num_expert_group",
        num_shared="num_shared_experts",
    ),
    router=_router("mlp.gate.weight", "mlp.gate.expert_bias"),
)

# Families with layouts of their own: Qwen, Mixtral, MiniMax, gpt-oss, Llama 4, LongCat, Step.
QWEN3_MOE = _alike(
    _PLAIN,
    "Qwen3-MoE",
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    keys=_keys(
        "num_experts num_local_experts",
        "moe_intermediate_size",
        moe_layers=((Rule.NOT_IN, "mlp_only_layers"), (Rule.EVERY_NTH, "decoder_sparse_step")),
    ),
)
QWEN3_NEXT = _alike(
    QWEN3_MOE,
    "Qwen3-Next",
    "qwen3_next",
    "Qwen3NextForCausalLM",
    shared=(*shared_names("mlp.shared_expert"), "mlp.shared_expert_gate.weight"),
    mtp_layers=_MTP,
)
_LOCAL = _keys("num_local_experts", "intermediate_size")
MIXTRAL = _alike(
    _PLAIN,
    "Mixtral",
    "mixtral",
    "MixtralForCausalLM",
    keys=_LOCAL,
    layouts=(separate("block_sparse_moe.experts", "w1", "w3", "w2"),),
    router=_router("block_sparse_moe.gate.weight"),
)
MINIMAX_M2 = _alike(
    MIXTRAL,
    "MiniMax-M2",
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    router=_router("block_sparse_moe.gate.weight", "block_sparse_moe.e_score_correction_bias"),
)
STEP_35 = _alike(
    _PLAIN,
    "Step-3.5, 3.7",
    "step3p5 step3p7",
    "Step3p5ForCausalLM Step3p7ForConditionalGeneration",
    keys=_keys(
        "moe_num_experts n_routed_experts",
        "moe_intermediate_size",
        top_k="moe_top_k num_experts_per_tok",
        moe_layers=((Rule.ONLY_IN, "moe_layers_enum"), (Rule.TYPES, "mlp_layer_types")),
    ),
    layouts=(ExpertLayout(gate="moe.gate_proj", up="moe.up_proj", down="moe.down_proj"),),
    router=_router("moe.gate.weight", "moe.router_bias"),
    shared=shared_names("share_expert"),
    sections=_TEXT,
)

# The model of the demo and the tests, whose weights ``runtime.checkpoints.own_model`` writes.
OWN_MODEL = _alike(
    _PLAIN,
    "eplb's own model",
    "eplb",
    keys=_keys(
        "n_routed_experts",
        "moe_intermediate_size",
        moe_layers=((Rule.ONLY_IN, "moe_layers"),),
        num_shared="n_shared_experts",
    ),
    shared=shared_names("mlp.shared_experts"),
)

FAMILIES: tuple[Family, ...] = (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    _alike(DEEPSEEK_V3, "DeepSeek-V3.2", "deepseek_v32", "DeepseekV32ForCausalLM"),
    DEEPSEEK_V4,
    _alike(
        DEEPSEEK_OCR2,
        "DeepSeek-OCR",
        "deepseek_ocr deepseekocr DeepseekOCR",
        "DeepseekOCRForCausalLM",
        unproven="the library has DeepSeek-OCR-2 only; names as vLLM loads them",
    ),
    DEEPSEEK_OCR2,
    _alike(DEEPSEEK_V3, "Kimi K2", "kimi_k2", "KimiK2ForCausalLM"),
    _alike(
        DEEPSEEK_V3,
        "Kimi K2.5",
        "kimi_k25",
        "Kimi_K25ForConditionalGeneration KimiK25ForConditionalGeneration",
        layers=("language_model.model.layers.{layer}", "model.language_model.layers.{layer}"),
        mtp_layers=(),
        sections=_TEXT,
    ),
    _alike(
        MIXTRAL,
        "Kimi Linear",
        "kimi_linear",
        "KimiLinearForCausalLM",
        keys=_keys(
            "num_experts num_local_experts",
            "moe_intermediate_size",
            top_k="num_experts_per_token num_experts_per_tok",
            moe_layers=_DENSE_FIRST,
            num_groups="num_expert_group",
            num_shared="num_shared_experts",
        ),
        router=_router(
            "block_sparse_moe.gate.weight", "block_sparse_moe.gate.e_score_correction_bias"
        ),
        shared=shared_names("block_sparse_moe.shared_experts"),
    ),
    _alike(DEEPSEEK_V3, "GLM-4.5", "glm4_moe", "Glm4MoeForCausalLM"),
    _alike(
        LING_HYBRID,
        "Ling, Ling 2.0",
        "bailing_moe bailing_moe_v2",
        "BailingMoeForCausalLM BailingMoeV2ForCausalLM",
        unproven="the library has Ling 3.0 only; names as vLLM loads them",
    ),
    LING_HYBRID,
    QWEN3_MOE,
    QWEN3_NEXT,
    _alike(
        QWEN3_NEXT,
        "Qwen3.5-MoE",
        "qwen3_5_moe qwen3_5_moe_text",
        "Qwen3_5MoeForConditionalGeneration Qwen3_5MoeForCausalLM",
        layers=("model.language_model.layers.{layer}", _LAYER),
        layouts=(
            ExpertLayout(gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj"),
            separate(),  # the FP8 checkpoints
        ),
        sections=_TEXT,
    ),
    MIXTRAL,
    _alike(
        MIXTRAL,
        "MiniMax-M1",
        "minimax_m1 minimax_text_01 minimax",
        "MiniMaxM1ForCausalLM MiniMaxText01ForCausalLM MiniMaxForCausalLM",
    ),
    MINIMAX_M2,
    _alike(
        MINIMAX_M2,
        "MiniMax-M3",
        "minimax_m3_vl minimax_m3_vl_text minimax_m3",
        "MiniMaxM3SparseForConditionalGeneration MiniMaxM3SparseForCausalLM",
        keys=replace(
            _LOCAL,
            moe_layers=((Rule.TYPES, "mlp_layer_types"), (Rule.EVERY, "moe_layer_freq")),
            num_shared=("n_shared_experts",),
        ),
        layers=_IN_VISION_MODEL,
        shared=shared_names("block_sparse_moe.shared_experts"),
        sections=_TEXT,
    ),
    _alike(_PLAIN, "OLMoE", "olmoe", "OlmoeForCausalLM"),
    _alike(
        _PLAIN,
        "gpt-oss",
        "gpt_oss",
        "GptOssForCausalLM",
        keys=_keys(
            "num_local_experts num_experts",
            "intermediate_size",
            top_k="num_experts_per_tok experts_per_token",
        ),
        layouts=(
            ExpertLayout(
                gate_up="mlp.experts.gate_up_proj",
                down="mlp.experts.down_proj",
                is_transposed=True,
                is_interleaved=True,
            ),
        ),
        router=(("weight", "mlp.router.weight"), ("bias", "mlp.router.bias")),
    ),
    _alike(
        _PLAIN,
        "Llama 4",
        "llama4 llama4_text",
        "Llama4ForConditionalGeneration Llama4ForCausalLM",
        keys=replace(
            _LOCAL,
            moe_layers=(
                (Rule.ONLY_IN, "moe_layers"),
                (Rule.EVERY_NTH, "interleave_moe_layer_step"),
            ),
        ),
        layers=_IN_VISION_MODEL,
        layouts=(
            ExpertLayout(
                gate_up="feed_forward.experts.gate_up_proj",
                down="feed_forward.experts.down_proj",
                is_transposed=True,
            ),
            separate("feed_forward.experts"),  # the FP8 checkpoints
        ),
        router=_router("feed_forward.router.weight"),
        shared=shared_names("feed_forward.shared_expert"),
        sections=_TEXT,
    ),
    _alike(
        _PLAIN,
        "LongCat-Flash",
        "longcat_flash",
        "LongcatFlashForCausalLM LongcatCausalLM",
        keys=_keys(
            "n_routed_experts",
            "expert_ffn_hidden_size",
            top_k="moe_topk num_experts_per_tok",
            num_layers="num_layers num_hidden_layers",
            num_zero="zero_expert_num",
        ),
        router=_router("mlp.router.classifier.weight", "mlp.router.e_score_correction_bias"),
    ),
    _alike(
        _PLAIN,
        "Hunyuan",
        "hunyuan_v1_moe hunyuan",
        "HunYuanMoEV1ForCausalLM HunYuanMoEForCausalLM",
        keys=_keys(
            "num_experts",
            "moe_intermediate_size intermediate_size",
            top_k="moe_topk num_experts_per_tok",
            moe_layers=((Rule.FROM, "moe_layer_num_skipped"),),
            num_shared="num_shared_expert",
        ),
        router=_router("mlp.gate.wg.weight"),
        shared=shared_names("mlp.shared_mlp"),
    ),
    _alike(
        STEP_35,
        "Step-3",
        "step3_text step3_vl step3",
        "Step3TextForCausalLM Step3VLForConditionalGeneration",
        router=_router("moe.gate.weight"),
        unproven="the library has Step-3.5 and 3.7 only; names as vLLM loads them",
    ),
    STEP_35,
    OWN_MODEL,
)

_registered: list[Family] = []


def register_family(family: Family) -> None:
    """Add the description of a family that is not in the table.

    Raises:
        ConfigError: another family has one of its model types.
    """
    for known in (*FAMILIES, *_registered):
        if common := set(known.model_types) & set(family.model_types):
            raise ConfigError(
                f"family {family.name!r} has model_type {sorted(common)[0]!r}, "
                f"expected one that {known.name!r} does not have"
            )
    _registered.append(family)


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Find the family by ``model_type``, else by ``architectures``.

    Raises:
        CheckpointError: neither is known.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures")
    families = (*FAMILIES, *_registered)
    for family in families:
        if model_type in family.model_types:
            return family
    listed = architectures if isinstance(architectures, list) else []
    for family in families:
        if any(name in family.architectures for name in listed):
            return family
    known = ", ".join(sorted(name for family in families for name in family.model_types))
    raise CheckpointError(
        f"{where}: unknown model family: model_type is {model_type!r} and architectures "
        f"{architectures!r}, expected a model_type of: {known}"
    )
