"""Values of other people's data loaders: batches, tensors, and their states as JSON."""

from __future__ import annotations

import base64
import contextlib
import importlib
import io
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_LISTS_OF_DICTS = (
    "Let it yield a list of dicts: let examples be dicts, and pass `collate_fn=list` "
    "in PyTorch."
)


def num_rows(batch: Mapping[str, Any], ragged: set[str]) -> int:
    """Returns the size of the leading axis of all features.

    Args:
      batch: a dict of columns.
      ragged: the columns that have had arrays of different lengths, which is updated.

    Raises:
      ValueError: if they do not have a common leading axis, or if it is not known
        whether a list holds the rows of a column.
    """
    for name, value in batch.items():
        _check_column(name, value, ragged)
    sizes = {name: _size(value) for name, value in batch.items()}
    size = next(iter(sizes.values()), None)
    if size is None or len(set(sizes.values())) > 1:
        raise ValueError(
            f"`loader` yields a batch whose features have {sizes} entries (None if "
            "there is no leading axis). With `batched=True`, all need the same leading "
            "axis. Repeat or remove the others, for instance in `collate_fn`."
        )
    return size


def _check_column(name: str, value: Any, ragged: set[str]) -> None:
    """Raises a ValueError if a column may as well be several transposed ones.

    These would all have the same length.
    """
    if not (isinstance(value, list | tuple) and any(map(_has_axis, value))):
        return
    if len({_size(x) for x in value}) > 1:
        ragged.add(name)
    if name not in ragged:
        raise ValueError(
            f"`loader` yields a batch whose column {name!r} is a "
            f"{type(value).__name__} of arrays. These may be its rows, or, from "
            "PyTorch's default `collate_fn`, the first tokens of all rows, then the "
            f"second ones, and so on. {_LISTS_OF_DICTS} For a Hugging Face "
            'dataset, `with_format("torch")` helps if all rows have the same length.'
        )


def check_examples(batch: Sequence[Any]) -> None:
    """Raises a ValueError if a list may hold the columns of a batch, not examples."""
    kinds = {type(x).__name__ for x in batch if isinstance(x, list | tuple)}
    if any(map(_has_axis, batch)):
        kinds.add("array")
    if kinds:
        names = " and ".join(f"{kind}s" for kind in sorted(kinds))
        raise ValueError(
            f"`loader` yields a {type(batch).__name__} of {names}, which may be the "
            "examples or the columns of a batch: PyTorch's default "
            f"`collate_fn` makes columns. {_LISTS_OF_DICTS}"
        )


def _has_axis(value: Any) -> bool:
    return hasattr(value, "__array__") and getattr(value, "ndim", 1) > 0


def _size(value: Any) -> int | None:
    """Returns the size of the leading axis; None for a scalar, text or dict."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
        return None
    return len(value) if getattr(value, "ndim", 1) else None


def to_numpy(value: Any) -> Any:
    """Returns a tensor of another library as a numpy array."""
    if isinstance(value, np.ndarray) or not hasattr(value, "__array__"):
        return value
    # Tensors that require gradients or are on devices refuse `np.asarray`.
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            # PyTorch does not convert this type, which numpy has from ml_dtypes: jax,
            # and thus Grain, imports it.
            integers = value.view(importlib.import_module("torch").int16)
            return integers.numpy().view("bfloat16")
    return np.asarray(value)


def encoded(value: Any) -> Any:
    """Returns the state of a loader for JSON, with arrays and tensors in base64.

    Unlike pickled objects, they cannot execute code when a checkpoint is restored.

    Raises:
      TypeError: if the state contains any other object.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encoded(x) for x in value]
    if isinstance(value, tuple):
        return {"__tuple__": [encoded(x) for x in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: encoded(x) for key, x in value.items()}
        return {"__items__": [[encoded(key), encoded(value[key])] for key in value]}
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "detach"):
        name = "__tensor__" if hasattr(value, "detach") else "__array__"
        file = io.BytesIO()
        np.save(file, np.asarray(value), allow_pickle=False)
        return {name: base64.b64encode(file.getvalue()).decode()}
    raise TypeError(f"it contains a {type(value).__name__}")


def decoded(value: Any) -> Any:
    """Returns the state of a loader that `encoded` has converted."""
    match value:
        case list():
            return [decoded(x) for x in value]
        case {"__tuple__": content}:
            return tuple(decoded(content))
        case {"__items__": content}:
            return dict(decoded(content))
        case {"__bytes__": content}:
            return base64.b64decode(content)
        case {"__array__": content}:
            return _decoded_array(content)
        case {"__tensor__": content}:
            return importlib.import_module("torch").asarray(_decoded_array(content))
        case dict():
            return {key: decoded(x) for key, x in value.items()}
    return value


def _decoded_array(content: str) -> Any:
    array = np.load(io.BytesIO(base64.b64decode(content)), allow_pickle=False)
    return array[()]


def checksum_after(checksum: int, element: Any) -> int:
    """Returns the checksum of the elements before, and of the values of this one.

    Objects of unknown types count by their type only, because reading them may take
    long, and their bytes may differ between runs.

    Example:
      >>> checksum_after(0, {"text": "a"}) == checksum_after(0, {"text": "b"})
      False
    """
    if isinstance(element, Mapping):
        for name in sorted(element, key=str):
            checksum = checksum_after(checksum, str(name))
            checksum = checksum_after(checksum, element[name])
        return checksum
    if isinstance(element, list | tuple) and not _are_numbers(element):
        for value in element:
            checksum = checksum_after(checksum, value)
        return checksum
    return zlib.crc32(_bytes_of(element), checksum)


def _are_numbers(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(x, int | float) for x in values)


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode(errors="surrogatepass")
    if isinstance(value, bytes):
        return value
    if isinstance(value, list | tuple | int | float | np.generic | np.ndarray):
        array = np.asarray(value)
        if not array.dtype.hasobject:
            return array.tobytes()
    tensor: Any = value
    if type(tensor).__module__.startswith("torch"):
        with contextlib.suppress(Exception):
            return to_numpy(tensor.detach()).tobytes()
    return type(value).__name__.encode()
