"""Typed access to numba: compiled functions, records that they pass by reference, array types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import event, types
from numba.core.caching import FunctionCache
from numba.experimental import structref
from numpy.typing import NDArray

Compiled = TypeVar("Compiled", bound=Callable[..., Any])
Fields = TypeVar("Fields")
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


# A plain -1 or 0 as an argument makes numba compile the function once more for that literal.
NONE = cast(int, np.int64(-1))
ZERO = cast(int, np.int64(0))


function_cache: Any = FunctionCache  # untyped


class _Cache(function_cache):  # type: ignore[misc]
    """numba's cache on disk, which an earlier version of this package may have written."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function for a signature; None where it must be compiled."""
        try:
            return super().load_overload(sig, target_context)
        except (ImportError, AttributeError):  # it names a module or a type that is gone
            self.flush()
            return None


def jit(function: Compiled) -> Compiled:
    """Compile on first use, cached on disk if it can be; no interpreter lock while it runs.

    No fast math: results equal those of ``tests/support/slow_planner.py`` to the last bit. Division
    by zero gives infinity as in numpy, since a check at every division costs time.
    """
    compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
    try:
        compiled._cache = _Cache(function)
    except RuntimeError as exc:
        if "no locator available" not in str(exc):
            raise
        # No writable cache directory (read-only install and home): each process compiles.
    # numba's dispatcher is called like the function; its own type does not express that.
    return cast(Compiled, compiled)


@jit
def copy_into(target: IntArray | FloatArray, source: IntArray | FloatArray) -> None:
    """As ``target[:] = source``, which takes long to compile."""
    for place in range(len(target)):
        target[place] = source[place]


def by_reference(fields: type[Fields]) -> Callable[..., Fields]:
    """A constructor of records with the annotated fields of a class, for compiled code only.

    A tuple of twenty arrays is 200 values that every call copies, and that took most of the
    compiler's time; a record is one pointer. Fields are given in order.
    """
    name = f"{fields.__name__}Record"
    kind = type(name, (types.StructRef,), {"__module__": __name__})
    # The cache on disk refers to a record's type by its module and name.
    assert name not in globals(), "names of record types are unique"
    records: Any = structref  # untyped
    globals()[name] = records.register(kind)
    maker = type(fields.__name__, (), {})
    records.define_constructor(maker, kind, list(fields.__annotations__))
    records.define_attributes(kind)
    return cast(Callable[..., Fields], maker)


class _Passes(event.Listener):
    def __init__(self, on_pass: Callable[[str], None]) -> None:
        self._on_pass = on_pass

    def on_start(self, event: Any) -> None:
        self._on_pass(f"{event.data['module']}.{event.data['qualname']}")

    def on_end(self, event: Any) -> None:
        """Nothing: the next pass begins at once."""


@contextmanager
def compiler_passes(on_pass: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_pass`` with the name of the function at each pass of the compiler over it.

    A function that is on disk already causes no call.
    """
    with event.install_listener("numba:run_pass", _Passes(on_pass)):
        yield
