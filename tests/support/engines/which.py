"""The engine of this environment by name: tests that only read its files need no import of it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

NAME = "vllm" if find_spec("vllm") is not None else "sglang"
if find_spec(NAME) is None:
    pytest.skip("run `make test-engines`: it has engines' wheels", allow_module_level=True)

ENTRY: Any = import_module(f"rebalance.engines.{NAME}.entry")
ASSUMPTIONS: Any = import_module(f"rebalance.engines.{NAME}.assumptions")
