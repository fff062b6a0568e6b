"""A name for a function by what it does, the same in every process and every run."""

from __future__ import annotations

import functools
import inspect
import pickle
import types
from collections.abc import Iterator
from typing import Any

from jaxbucket.base import digest

# One that all versions of Python know.
_PROTOCOL = 4


def function_name(function: Any) -> str:
    """Returns 32 hex digits that name a function: its code, and all it was made with.

    Closures, defaults, the arguments of a partial and the attributes of an object are
    looked into; the functions that it calls are not. Another version of Python may
    have other code for the same function.

    Example:
      >>> def times(n):
      ...     return lambda x: n * len(x)
      >>> function_name(times(2)) == function_name(times(2))
      True
      >>> function_name(times(2)) == function_name(times(3))
      False

    Raises:
      ValueError: if it holds something that cannot be pickled.
    """
    return digest(*_parts(function, []))


def _parts(value: Any, above: list[Any]) -> Iterator[bytes]:
    if any(value is other for other in above):
        # A function may well be in its own closure.
        yield b"again"
        return
    inner = _inner(value)
    if inner is None:
        yield _pickled(value)
        return
    yield f"{type(value).__qualname__} {len(inner)}".encode()
    for part in inner:
        yield from _parts(part, [*above, value])


def _inner(value: Any) -> list[Any] | None:
    """What a value consists of; None if it is one piece."""
    match value:
        case types.CodeType():
            return [value.co_code, *value.co_names, *value.co_consts]
        case types.FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            made_with = [value.__defaults__, value.__kwdefaults__, *cells]
            return [value.__qualname__, value.__code__, *made_with]
        case types.MethodType():
            return [value.__func__, value.__self__]
        case functools.partial():
            return [value.func, *value.args, value.keywords]
        case dict():
            return [part for item in value.items() for part in item]
        case set() | frozenset():
            # Their order is another one in every run.
            return sorted(value, key=repr)
        case list() | tuple():
            return [*value]
        case type():
            return [value.__module__, value.__qualname__]
        case types.ModuleType():
            return [value.__name__]
    if hasattr(value, "__dict__") and not isinstance(value, types.BuiltinFunctionType):
        call = inspect.getattr_static(type(value), "__call__", None)
        written = [call] if isinstance(call, types.FunctionType) else []
        return [*_reduced(value), *written]
    return None


def _reduced(value: Any) -> list[Any]:
    """What pickle would keep of an object, whose class it may not know by name."""
    try:
        reduced = value.__reduce_ex__(_PROTOCOL)
    except Exception as error:
        raise _refusal(value, error) from None
    if isinstance(reduced, str):
        return [reduced]
    made_of, items = reduced[:3], reduced[3:5]
    return [*made_of, *(list(each) for each in items if each is not None)]


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value, _PROTOCOL)
    except Exception as error:
        raise _refusal(value, error) from None


def _refusal(value: Any, error: Exception) -> ValueError:
    return ValueError(
        f"`length_fn` holds a {type(value).__name__}, which cannot be named: {error}. "
        "Leave out `cache`, or give a function that does not hold it."
    )
