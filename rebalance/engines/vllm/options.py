"""Whether a command that starts vLLM fits its balancer and the plug-in, before it is started.

The rules are those of the validation in vllm 0.33 (``config/parallel.py``, ``config/vllm.py``, the
expert layer and the loaders), and the plug-in's own. Neither vLLM nor torch is imported.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from eplb.errors import ConfigError

SHORT = {
    "-tp": "tensor-parallel-size",
    "-dp": "data-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-ep": "enable-expert-parallel",
    "-q": "quantization",
}
SWITCHES = {
    "enable-expert-parallel",
    "enable-eplb",
    "enable-elastic-ep",
    "data-parallel-hybrid-lb",
    "data-parallel-external-lb",
    "enable-dbo",
}
# Of ``--eplb-config``, with the type of each.
BALANCER: dict[str, type] = {
    "window_size": int,
    "step_interval": int,
    "num_redundant_experts": int,
    "log_balancedness": bool,
    "log_balancedness_interval": int,
    "use_async": bool,
    "policy": str,
    "communicator": str,
    "enable_migration_batching": bool,
}
COMMUNICATORS = ("torch_nccl", "torch_gloo", "torch_xccl", "nixl", "pynccl")
MOST_REDUNDANT = 1023
EXPERT_COUNTS = "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"
# Quantisations of expert layers by the name in a model's config.json.
BALANCED = {"fp8"}
REFUSED = {"awq", "awq_marlin", "bitsandbytes", "gguf", "gptq", "gptq_marlin", "moe_wna16"}
GPT_OSS = "GptOssForCausalLM"  # its mxfp4 layers are refused, those of other models are not


class Remark(NamedTuple):
    """What one check found; ``expected`` is "" where it is as it should be."""

    subject: str
    found: str
    expected: str = ""


@dataclass(frozen=True)
class ServeOptions:
    """What of a command line matters here."""

    model: str
    values: Mapping[str, str]  # by the long name without dashes
    balancer: Mapping[str, Any] = field(default_factory=dict)  # of --eplb-config

    def has(self, switch: str) -> bool:
        """Whether a switch is on."""
        return self.values.get(switch, "false") == "true"

    @property
    def uses_ray(self) -> bool:
        """Whether Ray starts processes, which get few variables of the environment."""
        names = "distributed-executor-backend", "data-parallel-backend"
        return "ray" in (self.values.get(name) for name in names)

    def size(self, name: str) -> int:
        """A number of ranks, 1 by default."""
        value = self.values.get(name, "1")
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"--{name} is {value!r}, expected a number from 1 on")
        return int(value)


def options_of(command: str) -> ServeOptions:
    """Read ``vllm serve MODEL ...``; variables of the environment may stand before it.

    Raises:
        ConfigError: it is no such command, or an option has no readable value.
    """
    try:
        words = shlex.split(command)
    except ValueError as exc:
        raise ConfigError(f"the engine's command cannot be read: {exc}") from exc
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    if words[:2] != ["vllm", "serve"]:
        raise ConfigError(f"the engine's command is {command!r}, expected 'vllm serve MODEL ...'")
    values, model, waiting = {}, "", words[2:]
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-"):
            model = model or word
            continue
        name, has_value, value = word.partition("=")
        name = SHORT.get(name, name.removeprefix("--").replace("_", "-"))
        is_off = name.startswith("no-") and name.removeprefix("no-") in SWITCHES
        name = name.removeprefix("no-") if is_off else name
        if name in SWITCHES:
            value = "false" if is_off else (value or "true").lower()
        elif not has_value and waiting and not waiting[0].startswith("-"):
            value = waiting.pop(0)
        values[name] = value
    return ServeOptions(model or values.get("model", ""), values, _balancer(values))


def _balancer(values: Mapping[str, str]) -> dict[str, Any]:
    """``--eplb-config`` as JSON and by dotted names; the latter win."""
    text = values.get("eplb-config", "{}")
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"--eplb-config is {text!r}, expected JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise ConfigError(f"--eplb-config is {text!r}, expected a JSON object")
    for name, value in values.items():
        if name.startswith("eplb-config."):
            key = name.removeprefix("eplb-config.").replace("-", "_")
            is_text = BALANCER.get(key, str) is str
            try:
                found[key] = value if is_text else json.loads(value.lower())
            except ValueError as exc:
                raise ConfigError(f"--{name} is {value!r}, expected a number or a switch") from exc
    return found


def remarks(options: ServeOptions, model: Mapping[str, Any] | None) -> Iterator[Remark]:
    """Yield what every check found.

    Args:
        options: of the engine's command.
        model: the model's ``config.json``; None: not at hand.
    """
    ranks = 1
    for name in ("tensor", "prefill-context", "data"):
        ranks *= options.size(f"{name}-parallel-size")
    yield from _of_balancer(options)
    yield from _of_deployment(options, ranks)
    yield from _of_model(options, ranks, model)
    yield from _of_plugin(options)


INTERVALS = ("window_size", "step_interval", "log_balancedness_interval")


def _of_balancer(options: ServeOptions) -> Iterator[Remark]:
    for name, value in options.balancer.items():
        subject, kind = f"eplb-config.{name}", BALANCER.get(name)
        fits = type(value) is kind or (name == "communicator" and value is None)
        if kind is None:
            yield Remark(subject, "a setting that vLLM refuses", f"one of {', '.join(BALANCER)}")
        elif not fits:
            yield Remark(subject, repr(value), f"a value of type {kind.__name__}")
        elif name in INTERVALS and value < 1:
            yield Remark(subject, str(value), "1 or more")
        elif name == "num_redundant_experts" and not 0 <= value <= MOST_REDUNDANT:
            yield Remark(subject, str(value), f"0 to {MOST_REDUNDANT}")
        elif name == "policy" and value != "default":
            found = f"{value!r}, which vLLM 0.33 does not have"
            yield Remark(subject, found, "'default', which the plug-in replaces")
        elif name == "communicator" and value not in (None, *COMMUNICATORS):
            yield Remark(subject, repr(value), " or ".join(COMMUNICATORS))
        elif value in ("torch_nccl", "pynccl") and options.balancer.get("use_async", True):
            found = f"{value} with use_async, which vLLM refuses"
            yield Remark(subject, found, "torch_gloo or nixl, or use_async false")


def _of_deployment(options: ServeOptions, ranks: int) -> Iterator[Remark]:
    """What of the command but ``--eplb-config`` keeps vLLM, or the plug-in, from balancing."""
    is_on, refused = options.has("enable-eplb"), "with which vLLM refuses EPLB"
    if not is_on:
        yield Remark("enable-eplb", "not given: vLLM balances nothing", "--enable-eplb")
    if not is_on and options.balancer.get("num_redundant_experts", 0):
        found = "given without --enable-eplb, which vLLM refuses"
        expected = "--enable-eplb, or no redundant experts"
        yield Remark("eplb-config.num_redundant_experts", found, expected)
    if not options.has("enable-expert-parallel"):
        found = "not given: vLLM refuses EPLB without it"
        yield Remark("enable-expert-parallel", found, "--enable-expert-parallel")
    if ranks == 1:
        sizes = "1 by tensor, prefill-context and data parallel sizes"
        yield Remark("ranks", f"{sizes}: vLLM refuses EPLB on one rank", "2 or more")
    if options.values.get("all2all-backend") == "moonep":
        yield Remark("all2all-backend", f"moonep, {refused}", "another back end")
    if options.values.get("load-format") == "ipc_cache":
        yield Remark("load-format", f"ipc_cache, {refused}", "another format")
    if (stages := options.size("pipeline-parallel-size")) > 1:
        yield Remark("pipeline-parallel-size", f"{stages}: each stage is a group, with its own run")
    if options.has("enable-elastic-ep"):
        found = "given: the plug-in stays off, it was not tested with a changing number of ranks"
        yield Remark("enable-elastic-ep", found, "a fixed number of ranks")


def _of_model(
    options: ServeOptions, ranks: int, model: Mapping[str, Any] | None
) -> Iterator[Remark]:
    if model is None:
        yield Remark("model", f"{options.model or 'none'}: no config.json at hand, not checked")
        return
    text = {**model, **model.get("text_config", {})}
    experts = next((text[name] for name in EXPERT_COUNTS if isinstance(text.get(name), int)), 0)
    if not experts:
        yield Remark("model", "config.json without a number of experts", "a model with experts")
        return
    redundant = options.balancer.get("num_redundant_experts", 0)
    slots = experts + (redundant if isinstance(redundant, int) else 0)
    if slots % ranks:
        least = -(-slots // ranks) * ranks - experts
        yield Remark(
            "slots",
            f"{experts} experts and {redundant} redundant ones on {ranks} ranks, which vLLM "
            "refuses: it splits them evenly",
            f"num_redundant_experts {least}, for example",
        )
    else:
        yield Remark("slots", f"{slots} a layer, {slots // ranks} on each of {ranks} ranks")
    yield from _of_quantisation(options, text)


def _of_quantisation(options: ServeOptions, text: Mapping[str, Any]) -> Iterator[Remark]:
    given = text.get("quantization_config") or {}
    name = str(options.values.get("quantization") or given.get("quant_method") or "")
    is_gpt_oss = GPT_OSS in text.get("architectures", ()) and name == "mxfp4"
    if name in REFUSED or is_gpt_oss:
        yield Remark("quantisation", f"{name}: vLLM refuses EPLB with its expert layers", "another")
    elif name and name not in BALANCED:
        yield Remark("quantisation", f"{name}: depends on the layer's method, not checked")
    else:
        yield Remark("quantisation", name or "none")


def _of_plugin(options: ServeOptions) -> Iterator[Remark]:
    communicator = options.balancer.get("communicator")
    if communicator == "torch_gloo":
        yield Remark("mover", "experts are checked on their way")
    else:
        yield Remark("mover", f"communicator {communicator}: off, vLLM moves experts unchecked")
    window = options.balancer.get("window_size", 1000)
    interval = options.balancer.get("step_interval", 3000)
    yield Remark("plans", f"every {interval} passes, on the load of the last {window}")


def model_config_of(options: ServeOptions, path: Path | None) -> Mapping[str, Any] | None:
    """The ``config.json`` of a path, else of the model's folder; None where there is none.

    Raises:
        HistoryError, ConfigError: it cannot be read.
    """
    from telemetry.formats.bounded import read_json, reading

    file = path if path is not None else Path(options.model or ".") / "config.json"
    if path is None and not (options.model and file.is_file()):
        return None
    file = file / "config.json" if file.is_dir() else file
    with reading(file, "a model's config.json"):
        found = read_json(file)
        if not isinstance(found, dict):
            raise ConfigError(f"{file} is no JSON object, expected a model's config.json")
    return found
