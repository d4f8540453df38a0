"""Owned, read-only arrays: how the frozen types of this package hold their data."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

# Stands for "not given" in an array field that has a derived default; told by identity.
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


def freeze(instance: object, **arrays: NDArray[Any] | None) -> None:
    """Set fields of a frozen dataclass from its ``__post_init__``."""
    for name, array in arrays.items():
        object.__setattr__(instance, name, array)
