"""What fills sequences behind their end, and in empty rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

# One number, or name -> number and 0 for features not named.
PadValue: TypeAlias = float | Mapping[str, float]


def check_pad_value(pad_value: PadValue) -> float | dict[str, float]:
    """Returns it as plain Python, the names sorted.

    Raises:
      ValueError: if it is neither a number nor a mapping of numbers.
    """
    if not isinstance(pad_value, Mapping):
        return _number("pad_value", pad_value)
    other = [name for name in pad_value if not isinstance(name, str)]
    if other:
        raise ValueError(
            f"`pad_value` names {other}, which are not strings: features are named by "
            "these."
        )
    names = sorted(pad_value)
    return {name: _number(f"pad_value[{name!r}]", pad_value[name]) for name in names}


def _number(name: str, value: float) -> float:
    array = np.asarray(value)
    # Integers beyond 64 bits are objects.
    if array.ndim == 0 and (array.dtype.kind in "biuf" or isinstance(value, int)):
        return array.item()
    raise ValueError(
        f"`{name}={value!r}` is not a number. Give one, or a dict with one for each "
        "feature that 0 does not fill."
    )


def pad_arrays(
    pad_value: PadValue, dtypes: Mapping[str, np.dtype]
) -> dict[str, np.ndarray]:
    """Returns what fills each padded feature, `[]` of its dtype.

    Example:
      >>> dtypes = {"tokens": np.dtype("u1"), "labels": np.dtype("i4")}
      >>> pad_arrays({"labels": -100}, dtypes)
      {'tokens': array(0, dtype=uint8), 'labels': array(-100, dtype=int32)}

    Args:
      pad_value: name -> number, 0 for those without one; or a number for all, which is
        0 unless there is one feature only.
      dtypes: name -> dtype, of the features that are padded.

    Raises:
      ValueError: if it names another feature, or is one number for several features,
        or one that a dtype cannot hold.
    """
    pad_value = check_pad_value(pad_value)
    if not isinstance(pad_value, dict):
        # Not a number is not 0 either.
        if len(dtypes) > 1 and not pad_value == 0:
            each = dict.fromkeys(dtypes, pad_value)
            raise ValueError(
                f"`pad_value={pad_value}` would fill {len(dtypes)} features. Say which "
                f"of them: `pad_value={each}`, without those that 0 fills."
            )
        pad_value = dict.fromkeys(dtypes, pad_value)
    unknown = [name for name in pad_value if name not in dtypes]
    if unknown:
        raise ValueError(
            f"`pad_value` names {unknown}, and the padded features are "
            f"{sorted(dtypes)}. Choose from these."
        )
    return {
        name: _pad_array(pad_value.get(name, 0), name, dtype)
        for name, dtype in dtypes.items()
    }


def _pad_array(value: float, name: str, dtype: np.dtype) -> np.ndarray:
    try:
        with np.errstate(all="ignore"):
            # Integers beyond 64 bits are objects, which are not cast to every float.
            exact = value if _is_integral(dtype) else float(value)
            pad = np.asarray(exact).astype(dtype)
    except (OverflowError, TypeError):
        pad = None
    if pad is None or not _is_held(value, pad):
        raise ValueError(
            f"`pad_value={value}`: feature {name!r} is {dtype}, which cannot hold it. "
            "Pad with another value, or give the source another dtype."
        )
    return pad


def _is_held(value: float, pad: np.ndarray) -> bool:
    """Integers exactly; of floats, what is finite stays so."""
    if _is_integral(pad.dtype):
        return int(pad) == value
    if issubclass(pad.dtype.type, np.void):
        return True
    if math.isnan(value):
        return bool(np.isnan(pad))
    if math.isinf(value):
        return bool(np.isinf(pad))
    return bool(np.isfinite(pad)) and abs(value) <= _largest(pad.dtype)


def _is_integral(dtype: np.dtype) -> bool:
    # Those of ml_dtypes, such as int4, are known by their names alone.
    return dtype.kind in "biu" or dtype.name.startswith(("int", "uint"))


def _largest(dtype: np.dtype) -> float:
    if dtype.type.__module__ == "numpy":
        # What is beyond it becomes infinite, in the narrow ones of ml_dtypes 6.0.
        return math.inf
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).max)
