"""Whether a command that starts vLLM fits the plug-in, before it is started.

vLLM's own parser reads the command, so what vLLM refuses there is refused here with its words.
The remarks are about what vLLM accepts in silence, or refuses when it builds the model.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from eplb.errors import ConfigError

EXPERT_COUNTS = "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"
UNKNOWN = "unrecognized arguments:"  # of argparse


class Remark(NamedTuple):
    """What one check found; ``expected`` is "" where it is as it should be."""

    subject: str
    found: str
    expected: str = ""


def options_of(command: str) -> Any:
    """Read ``vllm serve MODEL ...``; variables of the environment may stand before it.

    Returns:
        The namespace of vLLM's parser, whose ``eplb_config`` is vLLM's own and checked.

    Raises:
        ConfigError: it is no such command, or vLLM refuses an option or its value.
    """
    try:
        words = shlex.split(command)
    except ValueError as exc:
        raise ConfigError(f"the engine's command cannot be read: {exc}") from exc
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    if words[:2] != ["vllm", "serve"]:
        raise ConfigError(f"the engine's command is {command!r}, expected 'vllm serve MODEL ...'")
    options = _parser().parse_args(words[2:])
    options.model = options.model_tag or options.model
    return options


@cache
def _parser() -> Any:
    """The parser of ``vllm serve``, which raises in place of ending the process."""
    # Late: vLLM takes many seconds.
    from vllm.config.parallel import EPLBConfig
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if not current_platform.device_type:  # a host without an accelerator: the options are the same
        current_platform.device_type = "cpu"

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> None:
            """Refuse the command; a name that vLLM does not know, with names that it does."""
            text, known = " ".join(message.split()), list(self._option_string_actions)
            if message.startswith(UNKNOWN):
                name = message.removeprefix(UNKNOWN).split()[0].partition("=")[0]
                names = get_close_matches(name.replace("_", "-"), known) or ["those of its --help"]
                text = f"{text}, expected an option of vLLM: {' or '.join(names)}"
            elif "unexpected_keyword_argument" in message and "EPLBConfig" in message:
                text = f"{text}, expected one of: {', '.join(EPLBConfig.__dataclass_fields__)}"
            raise ConfigError(f"vLLM refuses the command: {text}")

    return make_arg_parser(Parser())


def uses_ray(options: Any) -> bool:
    """Whether Ray starts processes, which get few variables of the environment."""
    return "ray" in (options.distributed_executor_backend, options.data_parallel_backend)


def remarks(options: Any, model: Mapping[str, Any] | None) -> Iterator[Remark]:
    """Yield what every check found.

    Args:
        options: of the engine's command.
        model: the model's ``config.json``; None: not at hand.
    """
    if not options.enable_eplb:
        yield Remark("enable-eplb", "not given: vLLM balances nothing", "--enable-eplb")
    if options.enable_elastic_ep:
        found = "given: the plug-in stays off, it was not tested with a changing number of ranks"
        yield Remark("enable-elastic-ep", found, "a fixed number of ranks")
    if (stages := options.pipeline_parallel_size) > 1:
        yield Remark("pipeline-parallel-size", f"{stages}: each stage is a group, with its own run")
    yield from _of_model(options, model)
    balancer = options.eplb_config
    yield Remark("mover", "experts are checked after vLLM's transfer, before they serve")
    interval, window = balancer.step_interval, balancer.window_size
    yield Remark("plans", f"every {interval} passes, on the load of the last {window}")


def _of_model(options: Any, model: Mapping[str, Any] | None) -> Iterator[Remark]:
    if model is None:
        yield Remark("model", f"{options.model}: no config.json at hand, not checked")
        return
    text = {**model, **model.get("text_config", {})}
    experts = next((text[name] for name in EXPERT_COUNTS if isinstance(text.get(name), int)), 0)
    if not experts:
        yield Remark("model", "config.json without a number of experts", "a model with experts")
        return
    ranks = options.tensor_parallel_size * options.prefill_context_parallel_size
    ranks = max(1, ranks * options.data_parallel_size)  # vLLM refuses 0 at its start
    redundant = options.eplb_config.num_redundant_experts
    slots = experts + redundant
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


def model_config_of(options: Any, path: Path | None) -> Mapping[str, Any] | None:
    """The ``config.json`` of a path, else of the model's folder; None where there is none.

    Raises:
        HistoryError, ConfigError: it cannot be read.
    """
    from telemetry.formats.bounded import read_json, reading

    file = path if path is not None else Path(options.model) / "config.json"
    if path is None and not file.is_file():
        return None
    file = file / "config.json" if file.is_dir() else file
    with reading(file, "a model's config.json"):
        found = read_json(file)
        if not isinstance(found, dict):
            raise ConfigError(f"{file} is no JSON object, expected a model's config.json")
    return found
