"""``eplb check --engine``: whether the command that starts an engine fits its balancer and ours."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from api.deploy.checks.finding import Finding
from rebalance.engines.common.plugin_settings import CONFIG_VARIABLE, settings_of
from rebalance.engines.vllm.tools.options import model_config_of, options_of, remarks


def check_engine(
    command: str, model_config: Path | None, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Run every check of a command such as ``vllm serve MODEL --enable-eplb``.

    Raises:
        EplbError: the command or a file cannot be read.
    """
    options = options_of(command)
    for remark in remarks(options, model_config_of(options, model_config)):
        yield Finding(*remark)
    yield _plugin(environ)
    yield _release()


def _plugin(environ: Mapping[str, str]) -> Finding:
    settings = settings_of(environ)
    if settings is None:
        unset = f"{CONFIG_VARIABLE} is not set: the plug-in does nothing"
        return Finding("plug-in", unset, f"{CONFIG_VARIABLE} in every process of the engine")
    names = environ.get("VLLM_PLUGINS")
    if names is not None and "eplb" not in names.split(","):
        return Finding(
            "plug-in", f"VLLM_PLUGINS is {names!r}", "eplb among them, or no VLLM_PLUGINS"
        )
    return Finding("plug-in", f"deployment {settings.deployment!r}, store {settings.store}")


def _release() -> Finding:
    """The vLLM that is installed here, by the checks that the plug-in makes when it is loaded."""
    if find_spec("vllm") is None:
        return Finding("vllm", "not installed in this environment: its release is not checked")
    from rebalance.engines.vllm.guards import refusals  # late: it imports vLLM

    for refusal in refusals():
        return Finding("vllm", refusal, "a release that the plug-in was tested with")
    version = importlib.metadata.version("vllm")
    return Finding("vllm", f"{version}, all that the plug-in depends on is there")
