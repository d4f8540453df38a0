"""The engine of this environment: tests of what all engines do alike run with either."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("vllm") is not None:
    from tests.support.engines import vllm_ranks as engine
else:
    from tests.support.engines import sglang_ranks as engine  # type: ignore[no-redef]

__all__ = ["engine"]
