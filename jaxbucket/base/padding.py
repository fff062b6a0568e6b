"""Padding values: they fill sequences after their end, and empty rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

import numpy as np

# One number, or name -> number, with 0 for features that are not named.
PadValue: TypeAlias = float | Mapping[str, float]


def check_pad_value(pad_value: PadValue) -> float | dict[str, float]:
    """Returns `pad_value` as plain Python, sorted by name, after checking it."""
    if not isinstance(pad_value, Mapping):
        return _number("pad_value", pad_value)
    names = sorted(pad_value)
    return {name: _number(f"pad_value[{name!r}]", pad_value[name]) for name in names}


def _number(name: str, value: float) -> float:
    array = np.asarray(value)
    # Integers that do not fit in 64 bits have dtype object.
    if array.ndim == 0 and (array.dtype.kind in "biuf" or isinstance(value, int)):
        return array.item()
    raise ValueError(
        f"`{name}={value!r}` is not a number. Pass a number, or a dict from feature "
        "name to number. Features that are not named are padded with 0."
    )


def pad_arrays(
    pad_value: PadValue, dtypes: Mapping[str, np.dtype]
) -> dict[str, np.ndarray]:
    """Returns the padding value of each feature as a scalar array of its dtype.

    Example:
      >>> dtypes = {"tokens": np.dtype("u1"), "labels": np.dtype("i4")}
      >>> pad_arrays({"labels": -100}, dtypes)
      {'tokens': array(0, dtype=uint8), 'labels': array(-100, dtype=int32)}

    Args:
      pad_value: name -> number, with 0 for features that are not named. Or one number
        for all features, which must be 0 if there are several.
      dtypes: name -> dtype of each padded feature.
    """
    values = named_pad_values(pad_value, dtypes)
    return {
        name: _pad_array(values.get(name, 0), name, dtype)
        for name, dtype in dtypes.items()
    }


def named_pad_values(
    pad_value: PadValue, names: Collection[str]
) -> Mapping[str, float]:
    """Returns name -> padding value; a single number is that of each padded feature.

    It must be 0 if there are several.
    """
    pad_value = check_pad_value(pad_value)
    if not isinstance(pad_value, dict):
        each = dict.fromkeys(names, pad_value)
        # `not ... == 0` is also true for NaN.
        if len(names) > 1 and not pad_value == 0:
            raise ValueError(
                f"`pad_value={pad_value}` would fill {len(names)} features. Pass a "
                f"dict of the features that are not padded with 0: `pad_value={each}`."
            )
        return each
    unknown = [name for name in pad_value if name not in names]
    if unknown:
        raise ValueError(
            f"`pad_value` names {unknown}, but the padded features are "
            f"{sorted(names)}. Use their names."
        )
    return pad_value


def _pad_array(value: float, name: str, dtype: np.dtype) -> np.ndarray:
    try:
        with np.errstate(all="ignore"):
            # An integer that does not fit in 64 bits has dtype object, which cannot be
            # cast to every floating-point dtype.
            number = value if _is_integral(dtype) else float(value)
            pad = np.asarray(number).astype(dtype)
    except (OverflowError, TypeError):
        pad = None
    if pad is None or not _is_held(value, pad):
        raise ValueError(
            f"`pad_value={value}`: feature {name!r} is {dtype}, which cannot hold it. "
            "Use a different padding value, or a different dtype in the source."
        )
    return pad


def _is_held(value: float, pad: np.ndarray) -> bool:
    """Returns whether a dtype holds a value: integers exactly, floats without overflow.

    `pad` is the value after the cast to the dtype.
    """
    if _is_integral(pad.dtype):
        return int(pad) == value
    if issubclass(pad.dtype.type, np.void):
        return True
    return all(kind(pad) == kind(float(value)) for kind in (np.isfinite, np.isnan))


def _is_integral(dtype: np.dtype) -> bool:
    # The integers of ml_dtypes, such as int4, can only be identified by name.
    return dtype.kind in "biu" or dtype.name.startswith(("int", "uint"))
