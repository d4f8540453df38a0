"""A command that starts an engine, and what the checks of every engine say about it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eplb.errors import ConfigError

# The first words of a command, after variables of the environment and a launcher.
STARTS = {
    "vllm": re.compile(r"vllm serve"),
    "sglang": re.compile(r"(\S*python[\d.]* -m sglang\.launch_server|sglang serve)"),
    "trtllm": re.compile(r"(\S+ )*?trtllm-serve( serve)?"),
}
FORMS = "'vllm serve MODEL ...', 'python -m sglang.launch_server ...' or 'trtllm-serve MODEL ...'"
EXPERT_COUNTS = "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"


class Remark(NamedTuple):
    """What one check found; ``expected`` is "" where it is as it should be."""

    subject: str
    found: str
    expected: str = ""


def command_of(command: str) -> tuple[str, list[str]]:
    """The engine that a command starts, and the words after the ones that start it.

    Raises:
        ConfigError: it starts none, or cannot be read.
    """
    try:
        words = shlex.split(command)
    except ValueError as exc:
        raise ConfigError(f"the engine's command cannot be read: {exc}") from exc
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    text = " ".join(word.replace(" ", "_") for word in words)
    for engine, start in STARTS.items():
        match = start.match(f"{text} ")
        if match is not None and text[match.end() : match.end() + 1] in (" ", ""):
            return engine, words[len(match[0].split()) :]
    raise ConfigError(f"the engine's command is {command!r}, expected {FORMS}")


def remarks_on_slots(
    model: Mapping[str, Any] | None, named: str, redundant: int, ranks: int, option: str
) -> Iterator[Remark]:
    """Say how the experts of a model fit the ranks.

    Args:
        model: its ``config.json``; None: not at hand.
        named: the model, as the command names it.
        redundant: experts.
        ranks: expert-parallel ones.
        option: the engine's, for redundant experts.
    """
    if model is None:
        yield Remark("model", f"{named}: no config.json at hand, not checked")
        return
    text = {**model, **model.get("text_config", {})}
    experts = next((text[name] for name in EXPERT_COUNTS if isinstance(text.get(name), int)), 0)
    if not experts:
        yield Remark("model", "config.json without a number of experts", "a model with experts")
        return
    ranks, slots = max(1, ranks), experts + redundant  # an engine refuses 0 at its start
    if slots % ranks:
        least = -(-slots // ranks) * ranks - experts
        yield Remark(
            "slots",
            f"{experts} experts and {redundant} redundant ones on {ranks} ranks, which the engine "
            "refuses: it splits them evenly",
            f"{option} {least}, for example",
        )
    else:
        yield Remark("slots", f"{slots} a layer, {slots // ranks} on each of {ranks} ranks")


def model_config_of(model: str, path: Path | None) -> Mapping[str, Any] | None:
    """The ``config.json`` of a path, else of the model's folder; None where there is none.

    Raises:
        HistoryError, ConfigError: it cannot be read.
    """
    from telemetry.formats.bounded import read_json, reading

    file = path if path is not None else Path(model) / "config.json"
    if path is None and not file.is_file():
        return None
    file = file / "config.json" if file.is_dir() else file
    with reading(file, "a model's config.json"):
        found = read_json(file)
        if not isinstance(found, dict):
            raise ConfigError(f"{file} is no JSON object, expected a model's config.json")
    return found
