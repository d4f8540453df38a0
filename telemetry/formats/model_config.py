"""A model that a user names: a known one, or the config.json of any other."""

from __future__ import annotations

from pathlib import Path

from eplb.core.model import PRESETS, ModelShape, preset
from eplb.core.model_config import shape_of_config, stated_figures
from eplb.errors import ConfigError
from telemetry.formats.bounded import read_json, reading
from telemetry.written_files import file_digest

CONFIG_FILE = "config.json"


def model_by_name(name: str) -> ModelShape:
    """The model of a name: a known one's, or a file's.

    Args:
        name: ``deepseek-v3``; or a config.json of Hugging Face, or the folder of one, and figures
            in place of its own: ``config.json,top_k=8,layers=3-60``.

    Raises:
        ConfigError: neither a known model nor a file, or a figure that is nowhere.
        HistoryError: a file that cannot be read.
    """
    path, figures = _file_of(name)
    if path is None:
        try:
            return preset(name)
        except ConfigError as exc:
            raise ConfigError(f"{exc}; or the path of a model's {CONFIG_FILE}") from exc
    stated = stated_figures(figures, name)
    with reading(path, f"a model's {CONFIG_FILE}"):
        return shape_of_config(read_json(path), str(path), stated)


def model_digest(name: str) -> str:
    """Digest of the file that a name stands for; "" for a known model."""
    path, _ = _file_of(name)
    if path is None:
        return ""
    with reading(path, f"a model's {CONFIG_FILE}"):
        return file_digest(path)


def _file_of(name: str) -> tuple[Path | None, str]:
    """The file of a name, and the figures behind it; None: it is that of a known model, or none."""
    first, comma, figures = name.partition(",")
    path = Path(first)
    is_path = bool(comma) or path.suffix == ".json" or len(path.parts) > 1 or path.is_dir()
    if name in PRESETS or not is_path:
        return None, ""
    return path / CONFIG_FILE if path.is_dir() else path, figures
