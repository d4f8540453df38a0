"""Every family of the ``transformers`` library with experts: its defaults, as built by its code."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from eplb.core.model import ModelShape
from eplb.core.model_config import ANY_FAMILY, shape_of_config
from eplb.errors import ConfigError
from tests.support.models import library_models

library_models.transformers.utils.logging.set_verbosity_error()  # and the library is offline

LEAST_BUILT = 40  # families whose experts are compared


def configs() -> dict[str, Any]:
    """Configurations with their classes' defaults, by model type, of families with experts."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found = {}
    for name in CONFIG_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[name]()
            saved = config.to_json_string(use_diff=False)
        except Exception:  # classes without defaults: there is no file to read
            continue
        if any(f'"{key}"' in saved for key in ANY_FAMILY.num_experts):
            found[name] = config
    return found


def built_experts(config: Any) -> dict[int, torch.nn.Module] | None:
    """Modules with the experts of each layer, without memory; None: the library builds none."""
    from transformers import AutoModel, AutoModelForCausalLM

    for auto in (AutoModelForCausalLM, AutoModel):
        try:
            with torch.device("meta"):
                model = auto.from_config(config)
        except Exception:  # no such head, or defaults that fit no model
            continue
        return {
            int(number[1]): module
            for name, module in model.named_modules()
            if re.search(r"experts$", name)
            and not re.search("shared|vision", name)
            and isinstance(getattr(module, "down_proj", None), torch.nn.Parameter)
            and (number := re.search(r"\.(\d+)\.", name))
        }
    return None


def shape_or_question(config: Any) -> ModelShape | str:
    """The model that a class's defaults give, or the sentence that asks for more."""
    try:
        return shape_of_config(json.loads(config.to_json_string(use_diff=False)), "config.json", {})
    except ConfigError as exc:
        return str(exc)


ASKS = re.compile(r"config\.json,\w+=|is_moe is false|differs by layer")


@pytest.mark.slow
def test_figures_of_every_family_are_those_that_its_code_builds() -> None:
    compared = 0
    for name, config in configs().items():
        shape = shape_or_question(config)
        if isinstance(shape, str):
            assert ASKS.search(shape), (name, shape)
            continue
        experts = built_experts(config)
        if not experts:
            continue
        module = experts[shape.layer_ids[0]]
        num_experts, *sizes = module.down_proj.shape
        with_weights = int((shape.expert_cost > 0).sum())

        assert tuple(experts) == shape.layer_ids, name
        assert (num_experts, set(sizes)) == (
            with_weights,
            {shape.hidden, shape.intermediate},
        ), name
        assert shape.num_matrices == (3 if hasattr(module, "gate_up_proj") else 2), name
        compared += 1
    assert compared >= LEAST_BUILT


def test_figures_of_every_family_are_its_classs_attributes() -> None:
    read = 0
    for name, config in configs().items():
        shape = shape_or_question(config)
        if isinstance(shape, str):
            assert ASKS.search(shape), (name, shape)
            continue
        read += 1
        text = getattr(config, "thinker_config", config)
        text = getattr(text, "text_config", None) or text
        stated = [getattr(text, key, None) for key in ANY_FAMILY.num_experts]
        stated.append(getattr(getattr(text, "ffn_config", None), "moe_num_experts", None))
        blocks = getattr(text, "layers_block_type", None)
        layers = len(blocks) if blocks else getattr(text, "num_layers", text.num_hidden_layers)

        assert int((shape.expert_cost > 0).sum()) in stated, name
        assert max(shape.layer_ids) < layers, name
    assert read >= LEAST_BUILT
