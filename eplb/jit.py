"""numba behind one typed door: a compiled function keeps the types of the function it compiles."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


def jit(function: Compiled) -> Compiled:
    """Compile on first use, cached on disk, without the interpreter lock while it runs.

    No fast math: results must equal those of ``eplb/reference.py`` to the last bit.
    """
    # A dispatcher can do all that the function can, which its own type does not say.
    return cast(Compiled, numba.njit(nogil=True, cache=True)(function))
