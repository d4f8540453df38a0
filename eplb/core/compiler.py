"""The compiler of kernels, over numba: what ``eplb/core/jit.py`` declares is defined here.

numba takes 0.2 s of processor time to import: this module is imported at a kernel's first call.
"""

from __future__ import annotations

import hashlib
import logging
import pathlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import get_annotations
from threading import get_ident
from types import CodeType
from typing import Any

import numba
import numpy as np
from numba.core import caching, event, types
from numba.core.typing.templates import builtin_registry
from numba.experimental import structref

# Elements of the arrays that a kernel was given, in all calls together, after which it is compiled.
MOST_INTERPRETED = 200_000

log = logging.getLogger(__name__)
untyped: Any = caching
njit: Any = numba.njit


class _ByContent:
    """Where numba keeps a compiled function, valid while the code that it was made of is the same.

    numba's own stamp covers the one file that has the function, in some versions by its time.
    """

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)  # type: ignore[call-arg]  # of numba's locators
        self._function = function

    def get_source_stamp(self) -> str:
        """Nothing yet: functions that it calls may be defined after it, see ``_Cache``."""
        return ""

    def ensure_cache_path(self) -> None:
        """Accept a folder that cannot be written where the function was compiled into it before."""
        try:
            super().ensure_cache_path()  # type: ignore[misc]
        except OSError:
            folder: str = self.get_cache_path()  # type: ignore[attr-defined]
            code = self._function.__code__
            names = f"*.{self._function.__name__}-{code.co_firstlineno}.*.nbi"
            if not any(pathlib.Path(folder).glob(names)):
                raise


class _Implementation(untyped.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = tuple(
        type(one.__name__, (_ByContent, one), {})
        for one in untyped.CompileResultCacheImpl._locator_classes
    )


class _Cache(untyped.FunctionCache):  # type: ignore[misc]
    """numba's cache on disk, which an earlier version of this package may have written."""

    _impl_class = _Implementation

    def has(self, signature: Any, target: Any) -> bool:
        """Whether the function is on disk for this signature and this processor."""
        try:
            return self._index_key(signature, target.codegen()) in self._stamped()._load_index()
        except (ImportError, AttributeError):  # as in ``load_overload``
            return False

    def _stamped(self) -> Any:
        self._cache_file._source_stamp = code_digest(self._py_func)
        return self._cache_file

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function for a signature; None where it must be compiled."""
        self._stamped()
        try:
            return super().load_overload(sig, target_context)
        except (ImportError, AttributeError):  # it names a module or a type that is gone
            self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save a compiled function, unless only the folder of an image has it."""
        try:
            super().save_overload(sig, data)
        except OSError as exc:
            log.warning("kernel %s is compiled for this process only: %s", self._name, exc)


@cache
def code_digest(function: Any) -> str:
    """Digest of a function, and of all functions, records and figures that it names."""
    parts: list[Any] = []
    seen, waiting = {function.__code__}, [(function.__code__, function.__globals__)]
    while waiting:
        code, names = waiting.pop()
        parts.append((code.co_name, code.co_code, code.co_names, code.co_varnames))
        values = [getattr(names.get(name), "py_func", names.get(name)) for name in code.co_names]
        for value in (*code.co_consts, *values):
            if isinstance(value, CodeType) or hasattr(value, "__code__"):
                named = getattr(value, "__code__", value)
                if named not in seen:
                    seen.add(named)
                    waiting.append((named, getattr(value, "__globals__", names)))
            elif isinstance(value, type):
                parts.append(get_annotations(value))
            elif isinstance(value, int | float | tuple | str | np.generic):
                parts.append(value)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


# No fast math: results equal those of ``tests/support/slow_planner.py`` to the last bit. Division
# by zero gives infinity as in numpy, since a check at every division costs time.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_inner: list[Any] = []  # numba refers to them weakly


def define_inner(function: Callable[..., Any]) -> None:
    """Have kernels that call a function compile it too."""
    compiled: Any = njit(**OPTIONS, no_cpython_wrapper=True)(function)
    _register(function, compiled)
    _inner.append(compiled)


def _register(name: Any, compiled: Any) -> None:
    registry: Any = builtin_registry
    registry.register_global(name, types.Dispatcher(compiled))


def dispatcher_of(kernel: Any, at_once: Sequence[int] | None) -> Any:
    """Make what compiles a kernel, on disk if it can be; no interpreter lock while it runs.

    Args:
        kernel: an ``eplb.core.jit.LazyKernel``, which other kernels may call.
        at_once: threads that compile the kernel at its first call; others interpret it meanwhile.
            While there are none, it is interpreted until it has had enough work, unless it is on
            disk. None: it is never interpreted.
    """
    function = kernel.py_func
    compiled: Any = njit(**OPTIONS)(function)
    try:
        compiled._cache = _Cache(function)
    except RuntimeError as exc:
        if "no locator available" not in str(exc):
            raise
        # No writable cache directory (read-only install and home): each process compiles.
    _register(kernel, compiled)
    if at_once is not None:
        _interpret_first(compiled, function, at_once)
    return compiled


def _interpret_first(compiled: Any, function: Callable[..., Any], at_once: Sequence[int]) -> None:
    compile_for, on_disk, had = compiled._compile_for_args, compiled._cache, 0
    missing: set[Any] = set()

    def interpreted(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    def version_for(*args: Any) -> Any:
        """The compiled function for these arguments, or the interpreted one."""
        nonlocal had
        had += _num_elements(args)
        is_at_once = get_ident() in at_once
        if at_once and not is_at_once:
            return interpreted
        if is_at_once or had > MOST_INTERPRETED:
            if not isinstance(on_disk, _Cache):
                log.warning(
                    "kernel %s is compiled for this process only, which takes seconds: no folder "
                    "to keep it in, expected NUMBA_CACHE_DIR or `eplb compile` at installation",
                    function.__qualname__,
                )
            return compile_for(*args)
        signature = tuple(compiled.typeof_pyval(each) for each in args)
        if signature not in missing and isinstance(on_disk, _Cache):
            if on_disk.has(signature, compiled.targetctx):
                return compile_for(*args)
            missing.add(signature)
        return interpreted

    compiled._compile_for_args = version_for


def _num_elements(value: Any) -> int:
    """Elements of all arrays in arguments."""
    if isinstance(value, tuple):
        return sum(_num_elements(each) for each in value)
    return value.size if isinstance(value, np.ndarray) else 0


def define_record(fields: type[Any], maker: Any) -> None:
    """Have kernels pass the records that ``maker`` makes by reference."""
    name = f"{fields.__name__}Record"
    kind = type(name, (types.StructRef,), {"__module__": __name__})
    # The cache on disk refers to a record's type by its module and name.
    assert name not in globals(), "names of record types are unique"
    records: Any = structref  # untyped
    globals()[name] = records.register(kind)
    records.define_constructor(maker, kind, list(fields.__annotations__))
    records.define_attributes(kind)


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
