"""Whether a command that starts vLLM fits the plug-in, before it is started.

vLLM's own parser reads the command, so what vLLM refuses there is refused here with its words.
The remarks are about what vLLM accepts in silence, or refuses when it builds the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from eplb.errors import ConfigError
from rebalance.engines.common.command import Remark, remarks_on_slots
from rebalance.engines.common.guards import require
from rebalance.engines.vllm.assumptions import COMMAND, PARSERS

UNKNOWN = "unrecognized arguments:"  # of argparse


def options_of(words: Sequence[str]) -> Any:
    """Read the words after ``vllm serve``.

    Returns:
        The namespace of vLLM's parser, whose ``eplb_config`` is vLLM's own and checked.

    Raises:
        ConfigError: vLLM refuses an option or its value.
    """
    options = _parser().parse_args(list(words))
    options.model = options.model_tag or options.model
    return options


@cache
def _parser() -> Any:
    """The parser of ``vllm serve``, which raises in place of ending the process."""
    require(COMMAND)
    # Late: vLLM takes many seconds.
    from vllm.config.parallel import EPLBConfig
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

    module = next(each for each in PARSERS if find_spec(each) is not None)
    return import_module(module).make_arg_parser(Parser())


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
    ranks = options.tensor_parallel_size * options.prefill_context_parallel_size
    ranks *= options.data_parallel_size
    if options.enable_eplb and not options.enable_expert_parallel:
        found = "not given: vLLM refuses --enable-eplb without it"
        yield Remark("enable-expert-parallel", found, "--enable-expert-parallel")
    if options.enable_eplb and ranks < 2:
        found = f"{ranks} expert-parallel rank: vLLM refuses --enable-eplb with it"
        yield Remark("ranks", found, "--data-parallel-size or --tensor-parallel-size of 2 or more")
    redundant = options.eplb_config.num_redundant_experts
    yield from remarks_on_slots(model, options.model, redundant, ranks, "num_redundant_experts")
    balancer = options.eplb_config
    yield Remark("mover", "experts are checked after vLLM's transfer, before they serve")
    interval, window = balancer.step_interval, balancer.window_size
    yield Remark("plans", f"every {interval} passes, on the load of the last {window}")
