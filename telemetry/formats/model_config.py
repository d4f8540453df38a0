"""A model that a user names: a known one, or the config.json of any other."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from eplb.core.model import PRESETS, ModelShape, preset
from eplb.core.model_config import shape_of_config
from eplb.errors import ConfigError
from telemetry.formats.bounded import read_json, reading
from telemetry.written_files import file_digest

CONFIG_FILE = "config.json"


class NamedFile(NamedTuple):
    """A config.json that is named as a model, and the figures that follow its name."""

    path: Path
    stated: dict[str, str]


def model_by_name(name: str) -> ModelShape:
    """The model of a name: a known one's, or a file's.

    Args:
        name: ``deepseek-v3``; or a config.json of Hugging Face, or the folder of one, and figures
            in place of its own: ``config.json,top_k=8,layers=3-60``.

    Raises:
        ConfigError: neither a known model nor a file, or a figure that is nowhere.
        HistoryError: a file that cannot be read.
    """
    file = _file_of(name)
    if file is None:
        try:
            return preset(name)
        except ConfigError as exc:
            raise ConfigError(f"{exc}; or the path of a model's {CONFIG_FILE}") from exc
    with reading(file.path, f"a model's {CONFIG_FILE}"):
        return shape_of_config(read_json(file.path), str(file.path), file.stated)


def model_digest(name: str) -> str:
    """Digest of the file that a name stands for; "" for a known model."""
    file = _file_of(name)
    if file is None:
        return ""
    with reading(file.path, f"a model's {CONFIG_FILE}"):
        return file_digest(file.path)


def _file_of(name: str) -> NamedFile | None:
    """The file and figures of a name; None: it is that of a known model, or of none."""
    first, *pieces = name.split(",")
    path = Path(first)
    is_path = bool(pieces) or path.suffix == ".json" or len(path.parts) > 1 or path.is_dir()
    if name in PRESETS or not is_path:
        return None
    stated = dict[str, str]()
    for piece in pieces:
        figure, is_new, value = (part.strip() for part in piece.partition("="))
        if is_new and figure not in stated:
            stated[figure] = value
        elif stated and not is_new:  # a further number of a list
            stated[next(reversed(stated))] += f",{figure}"
        else:
            raise ConfigError(
                f"--model {name}: found {piece!r}, expected NAME=VALUE, each name once"
            )
    return NamedFile(path / CONFIG_FILE if path.is_dir() else path, stated)
