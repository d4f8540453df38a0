"""Whether a command that starts TensorRT-LLM balances experts by a file; it has no plug-in.

TensorRT-LLM ignores its load balancer in silence without expert parallelism and without attention
data parallelism. Both stand in the command or in its file of options, which is checked with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eplb.errors import ConfigError
from rebalance.engines.common.command import Remark

WITHOUT_BALANCER = ("VANILLA", "TRITON", "MARLIN")  # back ends of experts


class Parser(argparse.ArgumentParser):
    """Raises in place of ending the process."""

    def error(self, message: str) -> Any:
        """Refuse the command."""
        raise ConfigError(f"the command of TensorRT-LLM cannot be read: {message}")


def remarks(words: Sequence[str]) -> Iterator[Remark]:
    """Yield what every check found.

    Args:
        words: after ``trtllm-serve``.

    Raises:
        ConfigError: a value, or the file of options, cannot be read.
    """
    parser = Parser(prog="trtllm-serve", allow_abbrev=False)
    for names in ("--ep_size --moe_expert_parallel_size", "--tp_size"):
        parser.add_argument(*names.split(), type=int)
    parser.add_argument("--extra_llm_api_options", "--config", dest="file", type=Path)
    options, _ = parser.parse_known_args(words)
    settings = {} if options.file is None else _settings_in(options.file)
    ranks = options.ep_size or settings.get("moe_expert_parallel_size") or 1
    if ranks < 2:
        found = f"{ranks} expert-parallel rank: TensorRT-LLM ignores its load balancer in silence"
        yield Remark("ep_size", found, "--ep_size 2 or more")
    if settings.get("enable_attention_dp") is not True:
        found = "not true: TensorRT-LLM ignores its load balancer in silence"
        yield Remark("enable_attention_dp", found, "enable_attention_dp: true in the options' file")
    experts = settings.get("moe_config")
    experts = experts if isinstance(experts, dict) else {}
    if str(experts.get("backend", "")).upper() in WITHOUT_BALANCER:
        found = f"{experts['backend']}: it has no load balancer"
        yield Remark("moe_config.backend", found, "another back end, such as CUTLASS")
    balancer = experts.get("load_balancer")
    if balancer is None:
        expected = "the file that eplb plan --target trtllm writes"
        yield Remark("moe_config.load_balancer", "not given: experts are not balanced", expected)
    elif isinstance(balancer, str) and not Path(balancer).is_file():
        yield Remark("moe_config.load_balancer", f"{balancer} does not exist", "a file")
    else:
        yield Remark("moe_config.load_balancer", "given: eplb validate --target trtllm checks it")
    yield Remark("trtllm", "no other option and no release was checked; it has no plug-in")


def _settings_in(file: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        reason = " ".join(str(exc).split())[:200]
        raise ConfigError(
            f"{file} cannot be read: {reason}, expected TensorRT-LLM's options"
        ) from exc
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is no mapping, expected TensorRT-LLM's options")
    return found
