"""The engine of this environment: tests of what all engines do alike run with either."""

from __future__ import annotations

from tests.support.engines.which import NAME

if NAME == "vllm":
    from tests.support.engines import vllm_ranks as engine
else:
    from tests.support.engines import sglang_ranks as engine  # type: ignore[no-redef]

__all__ = ["engine"]
