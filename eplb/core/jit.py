"""Kernels, their parts, records that they pass by reference, and array types.

A kernel is a compiled function that Python calls; parts are functions that only kernels call. Until
a kernel has had enough work, Python interprets it, with the same result to the last bit: a plan for
58 layers of 256 experts takes one or two seconds so, and the compiler five times as long.

They are declared here, and defined by ``eplb/core/compiler.py`` at the first call of a kernel:
commands that plan nothing import no compiler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Compiled = TypeVar("Compiled", bound=Callable[..., Any])
Fields = TypeVar("Fields")
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

# A plain -1 or 0 as an argument makes numba compile the function once more for that literal.
NONE = cast(int, np.int64(-1))
ZERO = cast(int, np.int64(0))

_at_once: list[int] = []  # threads in ``compiled_at_once``
_defining = threading.RLock()
_declared: list[Callable[[Any], None]] = []  # each is given the compiler


class LazyKernel:
    """A function that is compiled, or interpreted at first; what it lacks the compiler's has."""

    def __init__(self, function: Callable[..., Any], at_once: list[int] | None) -> None:
        self.py_func, self.__doc__ = function, function.__doc__
        self._dispatcher: Any = None

        def define(compiler: Any) -> None:
            self._dispatcher = compiler.dispatcher_of(self, at_once)

        _declared.append(define)

    @property
    def dispatcher(self) -> Any:
        """What numba made of it."""
        if self._dispatcher is None:
            with _defining:
                from eplb.core import compiler

                while _declared:
                    _declared.pop(0)(compiler)
        return self._dispatcher

    def __call__(self, *args: Any) -> Any:
        """Call the compiled function, or the interpreted one."""
        return (self._dispatcher or self.dispatcher)(*args)


@contextmanager
def compiled_at_once() -> Iterator[None]:
    """Have this thread compile every kernel at its first call, instead of interpreting it.

    Other threads interpret meanwhile what is not compiled: they do not wait for the compiler.
    """
    thread = threading.get_ident()
    _at_once.append(thread)
    try:
        yield
    finally:
        _at_once.remove(thread)


def inner(function: Compiled) -> Compiled:
    """Compile a function with the kernels that call it; Python calls the function itself."""
    _declared.append(lambda compiler: compiler.define_inner(function))
    return function


def jit(function: Compiled) -> Compiled:
    """Compile on first use, kept on disk if it can be; no interpreter lock while it runs."""
    return cast(Compiled, LazyKernel(function, None))


def kernel(function: Compiled) -> Compiled:
    """As ``jit``, but interpreted until it has had enough work, unless it is on disk."""
    return cast(Compiled, LazyKernel(function, _at_once))


@inner
def copy_into(target: IntArray | FloatArray, source: IntArray | FloatArray) -> None:
    """As ``target[:] = source``, which takes long to compile."""
    for place in range(len(target)):
        target[place] = source[place]


def by_reference(fields: type[Fields]) -> Callable[..., Fields]:
    """A constructor of records with the annotated fields of a class, in order.

    A tuple of twenty arrays is 200 values that every call copies, and that took most of the
    compiler's time; a record is one pointer.
    """
    maker = dataclass(eq=False)(fields)  # as Python makes it, where it interprets
    _declared.append(lambda compiler: compiler.define_record(fields, maker))
    return maker
