"""Keys of measured values in a cache: what is measured, and how."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jaxbucket.base.digest import digest
from jaxbucket.data.source import Source, contents

# The user's name of a function; for several functions, of each.
CacheKey: TypeAlias = str | Mapping[str, str] | None


def file_keys(
    source: Source,
    features: Mapping[str | None, Sequence[str] | None],
    functions: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None,
    *,
    argument: str,
    cache: str | os.PathLike[str] | None,
    cache_key: CacheKey,
) -> dict[str | None, str]:
    """Returns 32 hex digits that identify the source and how each value is measured.

    Args:
      source: random-access source of examples.
      features: the features that determine each value, by the name of the value.
      functions: the functions passed by the user, which determine values instead.
      argument: name of the argument with the functions.
      cache: cache folder, or None.
      cache_key: the names of the functions, passed by the user.

    Raises:
      ValueError: if `cache_key` is missing, or does not name each function.
    """
    if cache is not None and functions is not None and cache_key is None:
        raise ValueError(_missing_message(cache, functions, argument))
    by_name = _checked(cache_key, functions, argument)
    sample = contents(source).encode()
    keys = {}
    for name, names in features.items():
        key = by_name.get(name) if isinstance(by_name, Mapping) else by_name
        several = isinstance(functions, Mapping)
        has_function = name in functions if several else functions is not None
        # Without a function, the key stands for a version of the data.
        label = repr((argument if has_function else None, key)) if key else ""
        how = f"{len(source)} {label} {names and list(names)}"
        keys[name] = digest(how.encode(), sample)
    return keys


def _checked(cache_key: CacheKey, functions: Any, argument: str) -> Any:
    """Returns the cache key after checking that it names each function."""
    if cache_key is None:
        return None
    if not isinstance(functions, Mapping):
        _check_text("cache_key", cache_key)
        return cache_key
    if not isinstance(cache_key, Mapping) or set(cache_key) != set(functions):
        raise ValueError(
            f"`cache_key={cache_key!r}` must be a mapping with a name for each "
            f"function in `{argument}`, such as {_example(functions, argument)}."
        )
    for name, key in cache_key.items():
        _check_text(f"cache_key[{name!r}]", key)
    return cache_key


def _check_text(name: str, key: Any) -> None:
    if not isinstance(key, str) or not key:
        raise ValueError(
            f'`{name}={key!r}` must be a non-empty string, such as "words-1".'
        )


def _missing_message(
    cache: str | os.PathLike[str], functions: Any, argument: str
) -> str:
    if isinstance(functions, Mapping):
        return (
            f"`cache={str(cache)!r}` requires `cache_key`: the cache cannot detect "
            f"changes of the functions in `{argument}`. Pass a name for each, such as "
            f"`cache_key={_example(functions, argument)}`, and change it whenever the "
            "function changes."
        )
    return (
        f"`cache={str(cache)!r}` requires `cache_key`: the cache cannot detect changes "
        f"of `{argument}`. Pass a name for the function, such as "
        f'`cache_key="{argument}-1"`, and change it whenever the function changes.'
    )


def _example(functions: Mapping[str, Any], argument: str) -> dict[str, str]:
    return dict.fromkeys(functions, f"{argument}-1")
