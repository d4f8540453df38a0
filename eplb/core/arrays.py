"""Owned, read-only arrays, in which the frozen types of this package hold their data."""

from operator import index
from types import NoneType
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from eplb.errors import ConfigError, EplbError

# "Not given" in an array field that has a derived default; compared by identity.
UNSET: NDArray[Any] = np.empty(0)
UNSET.flags.writeable = False


def unset() -> NDArray[Any]:
    """Return UNSET, as a dataclass ``default_factory``: arrays cannot be plain defaults."""
    return UNSET


def owned(values: ArrayLike, dtype: DTypeLike) -> NDArray[Any]:
    """Copy ``values`` into a new read-only array, so that no caller can change it later."""
    array = np.array(values, dtype=dtype, order="C")
    array.flags.writeable = False
    return array


def owned_whole(name: str, values: ArrayLike, error: type[EplbError]) -> NDArray[np.int32]:
    """``owned`` as int32, of whole numbers in any type; a cast would cut fractions off.

    Raises:
        error: another value, or one that does not fit.
    """
    try:
        given = np.asarray(values)
    except ValueError as exc:
        raise error(f"{name} is no array: {exc}") from exc
    if given.dtype.kind == "f":
        wrong = ~(given == np.floor(given)) | ~np.isfinite(given)
        if wrong.any():
            raise error(f"{name} has {given.flat[wrong.argmax()]}, expected whole numbers")
    elif given.dtype.kind not in "iub":
        raise error(f"{name} has dtype {given.dtype}, expected whole numbers")
    if given.size and not -(2**31) <= given.min() <= given.max() < 2**31:
        largest = max(abs(given.min()), abs(given.max()))
        raise error(f"{name} has {largest}, expected numbers of 32 bits")
    return owned(given, np.int32)


def on_host(values: Any) -> Any:
    """A torch tensor as a numpy array, anything else as it is; torch is never imported here.

    Floats become float64: numpy has no bfloat16, and the largest float16 is 65,504.
    """
    if hasattr(values, "detach"):  # a tensor may be on a device, and may require gradients
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    if getattr(values, "dtype", None) == np.float16:
        return np.asarray(values, dtype=np.float64)
    return values


def whole(name: str, value: object) -> int:
    """A whole number, numpy's included.

    Raises:
        ConfigError: a fraction, a boolean, or not a number.
    """
    if type(value) is int:  # at once: a constraint for each expert of a model is thousands of them
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ConfigError(f"{name} is {value!r}, expected a whole number")
    return index(value)


def of_type(name: str, value: object, *kinds: type[Any]) -> None:
    """Refuse a value of another type at the border, where a caller can be told.

    Raises:
        ConfigError: it is of none of these.
    """
    if not isinstance(value, kinds):
        known = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
        raise ConfigError(f"{name} is {value!r:.80}, expected {known}")


def freeze(instance: object, **arrays: NDArray[Any] | None) -> None:
    """Set fields of a frozen dataclass from its ``__post_init__``."""
    for name, array in arrays.items():
        object.__setattr__(instance, name, array)
