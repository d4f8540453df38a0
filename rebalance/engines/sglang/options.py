"""Whether a command that starts SGLang fits the plug-in, before it is started.

SGLang's own parser reads the command where it is installed. Elsewhere the options that matter here
are read, and all others are left unchecked.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from eplb.errors import ConfigError
from rebalance.engines.common.command import Remark, remarks_on_slots
from rebalance.engines.common.guards import require
from rebalance.engines.sglang.assumptions import COMMAND
from rebalance.engines.sglang.limits import why_unserved

# Back ends with which the expert-parallel size stays as it is given; others set it to that of
# tensor parallelism.
KEEP_SIZE = ("none", "ascend_tp")
KNOWN: dict[str, dict[str, Any]] = {
    "--model-path --model": {"default": ""},
    "--tp-size --tensor-parallel-size --tp": {"type": int, "default": 1},
    "--pp-size --pipeline-parallel-size --pp": {"type": int, "default": 1},
    "--ep-size --expert-parallel-size --ep": {"type": int, "default": 1},
    "--nnodes": {"type": int, "default": 1},
    "--enable-eplb": {"action": "store_true"},
    "--ep-num-redundant-experts": {"type": int, "default": 0},
    "--ep-dispatch-algorithm": {},
    "--eplb-rebalance-num-iterations": {"type": int, "default": 1000},
    "--moe-a2a-backend": {"default": "none"},
    "--expert-distribution-recorder-mode": {},
    "--elastic-ep-backend": {},
}


class Parser(argparse.ArgumentParser):
    """Raises in place of ending the process."""

    def error(self, message: str) -> Any:
        """Refuse the command; a name that SGLang does not know, with names that it does."""
        name = message.removeprefix("unrecognized arguments:").split()[0].partition("=")[0]
        known = [one for one in self._option_string_actions if one.startswith("--")]
        near = get_close_matches(name.replace("_", "-"), known)
        names = f", expected an option of SGLang: {' or '.join(near)}" if near else ""
        raise ConfigError(f"SGLang refuses the command: {message}{names}")


def options_of(words: Sequence[str]) -> Any:
    """Read the words after ``sglang.launch_server``, with what SGLang sets where they say nothing.

    Raises:
        ConfigError: an option or its value is refused.
    """
    is_here = find_spec("sglang") is not None
    parser = Parser(prog="sglang", allow_abbrev=is_here)  # SGLang's users write --tp
    if not is_here:
        for names, how in KNOWN.items():
            parser.add_argument(*names.split(), **how)
        options, _ = parser.parse_known_args(words)
    else:
        require(COMMAND)
        from sglang.srt.server_args import ServerArgs  # late: it takes seconds

        ServerArgs.add_cli_args(parser)
        options = parser.parse_args(words)
    if options.moe_a2a_backend not in KEEP_SIZE:
        options.ep_size = options.tp_size
    if options.ep_dispatch_algorithm is None:
        options.ep_dispatch_algorithm = "dynamic" if options.moe_a2a_backend == "none" else "static"
    if options.expert_distribution_recorder_mode is None:
        options.expert_distribution_recorder_mode = "stat"
    return options


def remarks(options: Any, model: Mapping[str, Any] | None) -> Iterator[Remark]:
    """Yield what every check found.

    Args:
        options: of the engine's command.
        model: the model's ``config.json``; None: not at hand.
    """
    if not options.enable_eplb:
        yield Remark("enable-eplb", "not given: SGLang balances nothing", "--enable-eplb")
    if options.ep_size < 2:
        found = f"{options.ep_size} expert-parallel rank: SGLang refuses --enable-eplb with it"
        yield Remark("ep-size", found, "--ep-size 2 or more")
    elif why := why_unserved(options, options, options.tp_size * options.pp_size):
        found, _, expected = why.partition(", expected ")
        yield Remark("options", found, expected)
    if options.elastic_ep_backend not in (None, "none"):
        found = (
            "given: the plug-in gives SGLang the map of the survivors after a death, and no more"
        )
        yield Remark("elastic-ep-backend", found)
    redundant = options.ep_num_redundant_experts
    yield from remarks_on_slots(
        model, options.model_path, redundant, options.ep_size, "--ep-num-redundant-experts"
    )
    yield Remark("plans", f"every {options.eplb_rebalance_num_iterations} passes")
    if find_spec("sglang") is None:
        yield Remark("sglang", "not installed here: no other option and no release was checked")
