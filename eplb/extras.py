"""Optional libraries: which extra of this package brings each, and the error where one is missing.

``pip install eplb`` brings what plans and simulates need. The rest comes with an extra, such as
``pip install 'eplb[api]'``, and is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from eplb.errors import ConfigError

# By the name of the module; pyproject.toml names the distributions.
EXTRA_OF = {
    "torch": "runtime",
    "redis": "redis",
    "fastapi": "api",
    "httpx": "api",
    "prometheus_client": "api",
    "sse_starlette": "api",
    "starlette": "api",  # FastAPI brings it
    "uvicorn": "api",
    "matplotlib": "sim",
    "plotly": "sim",
    "pyarrow": "sim",
    "ortools": "solver",
    "ray": "ray",
}


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Refuse what needs an optional library that is not installed.

    Args:
        what: needs the libraries that the block imports, for the message.

    Raises:
        ConfigError: one of them is missing; the message names the extra that brings it.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        library = (exc.name or "").partition(".")[0]
        if library not in EXTRA_OF:
            raise
        raise ConfigError(
            f"{what} needs {library}, which is not installed, "
            f"expected: pip install 'eplb[{EXTRA_OF[library]}]'"
        ) from exc
