"""numba behind two typed doors: compiled functions, and records that they pass by reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import types
from numba.experimental import structref

Compiled = TypeVar("Compiled", bound=Callable[..., Any])
Fields = TypeVar("Fields")


def jit(function: Compiled) -> Compiled:
    """Compile on first use, cached on disk if it can be; no interpreter lock while it runs.

    No fast math: results must equal those of ``eplb/search/reference.py`` to the last bit. Division
    by zero gives infinity as in numpy, since a check of every division is code of its own.
    """
    try:
        compiled = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError as exc:
        if "no locator available" not in str(exc):
            raise
        # A read-only install and no home that can be written: each process compiles for itself.
        compiled = numba.njit(nogil=True, error_model="numpy")(function)
    # A dispatcher can do all that the function can, which its own type does not say.
    return cast(Compiled, compiled)


def by_reference(fields: type[Fields]) -> Callable[..., Fields]:
    """What makes records with the annotated fields of a class, in compiled code only.

    A tuple of twenty arrays is 200 figures that every call copies and the compiler must follow
    one by one, which took most of its time; a record is one pointer. Fields are given in order.
    """
    name = f"{fields.__name__}Record"
    kind = type(name, (types.StructRef,), {"__module__": __name__})
    # The cache on disk names a record's type by where it is found.
    assert name not in globals(), "records have names of their own"
    records: Any = structref  # which has no types
    globals()[name] = records.register(kind)
    maker = type(fields.__name__, (), {})
    records.define_constructor(maker, kind, list(fields.__annotations__))
    records.define_attributes(kind)
    return cast(Callable[..., Fields], maker)
