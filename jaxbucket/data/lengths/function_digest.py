"""A name for a function by what it does, the same in every process and every run."""

from __future__ import annotations

import functools
import inspect
import pickle
import types
from typing import Any

from jaxbucket.base.digest import digest

# One that all versions of Python know.
_PROTOCOL = 4
# Of classes that a program makes, as against those of the interpreter.
_HEAP_TYPE = 1 << 9


def function_name(function: Any) -> str:
    """Returns 32 hex digits that name a function: its code, and all it was made with.

    Closures, defaults, the arguments of a partial, what a decorator wraps and the
    attributes of an object are looked into. Functions that it calls, and what it takes
    from its module or its class, are not. Another version of Python may have other code
    for the same function.

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
    walk = _Walk()
    try:
        walk.add(function)
    except RecursionError as error:
        raise _refusal(function, error) from None
    return digest(*walk.parts)


class _Walk:
    """Collects the parts of a value, each of them once, in an order of its own."""

    def __init__(self):
        self.parts: list[bytes] = []
        self._numbers: dict[int, int] = {}
        # So that no other one gets the address of one that was seen.
        self._kept: list[Any] = []

    def add(self, value: Any) -> None:
        inner = _inner(value)
        if inner is None:
            self.parts.append(_pickled(value))
        elif id(value) in self._numbers:
            # A function may well be in its own closure.
            self.parts.append(f"number {self._numbers[id(value)]}".encode())
        else:
            self._numbers[id(value)] = len(self._kept)
            self._kept.append((value, inner))
            self.parts.append(f"{type(value).__qualname__} {len(inner)}".encode())
            for part in inner:
                self.add(part)


def _inner(value: Any) -> list[Any] | None:
    """What a value consists of; None if it is one piece."""
    kind = type(value)
    if kind is types.CodeType:
        return [value.co_code, *value.co_names, *value.co_consts]
    if kind is types.FunctionType:
        cells = [_content(cell) for cell in value.__closure__ or ()]
        made_with = [value.__defaults__, value.__kwdefaults__, value.__dict__, *cells]
        return [value.__qualname__, value.__code__, *made_with]
    if kind is types.MethodType or kind is types.BuiltinMethodType:
        return [value.__name__, value.__self__, getattr(value, "__func__", None)]
    if kind in (staticmethod, classmethod):
        return [value.__func__]
    if kind is functools.partial:
        return [value.func, *value.args, value.keywords]
    if kind is types.ModuleType:
        return [value.__name__]
    if isinstance(value, type):
        return [value.__module__, value.__qualname__]
    if kind is dict:
        return [part for item in value.items() for part in item]
    if kind in (set, frozenset):
        # Their order is another one in every run.
        return sorted(value, key=repr)
    if kind in (list, tuple):
        return [*value]
    if (wrapped := inspect.getattr_static(value, "__wrapped__", None)) is not None:
        return [wrapped]
    if kind.__flags__ & _HEAP_TYPE:
        return [*_reduced(value), *_call_of(kind)]
    return None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"


def _call_of(kind: type) -> list[Any]:
    """What is done where such an object is called, if Python does it."""
    call = inspect.getattr_static(kind, "__call__", None)
    return [] if call is None or type(call) is types.WrapperDescriptorType else [call]


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
        f"The function holds a {type(value).__name__}, which cannot be named: {error}. "
        "Leave out `cache`, or give a function that does not hold it."
    )
