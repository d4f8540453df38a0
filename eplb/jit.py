"""numba behind one typed door: a compiled function keeps the types of the function it compiles."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


def jit(function: Compiled) -> Compiled:
    """Compile on first use, cached on disk if it can be; no interpreter lock while it runs.

    No fast math: results must equal those of ``eplb/reference.py`` to the last bit.
    """
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError as exc:
        if "no locator available" not in str(exc):
            raise
        # A read-only install and no home that can be written: each process compiles for itself.
        compiled = numba.njit(nogil=True)(function)
    # A dispatcher can do all that the function can, which its own type does not say.
    return cast(Compiled, compiled)
