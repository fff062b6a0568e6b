"""Keys of measured values in a cache: what is measured, and how."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jaxbucket.base.digest import digest
from jaxbucket.data.source import Source, contents

# The user's name of a function; for several functions, of each.
CacheKey: TypeAlias = str | Mapping[str, str] | None


def file_keys(
    source: Source,
    features: Mapping[str | None, Any],
    functions: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None,
    *,
    argument: str,
    cache: str | os.PathLike[str] | None,
    cache_key: CacheKey,
) -> dict[str | None, str]:
    """Returns 32 hex digits that identify the source and how each value is measured.

    Args:
      source: random-access source of examples.
      features: what identifies the features that determine each value, by the name of
        the value; its text is part of the key.
      functions: the functions passed by the user, which determine values instead.
      argument: name of the argument with the functions.
      cache: cache folder, or None.
      cache_key: the names of the functions, passed by the user.

    Raises:
      ValueError: if `cache_key` is missing, or does not name each function.
    """
    if cache is not None and functions is not None and cache_key is None:
        raise ValueError(_missing_message(cache, functions, argument))
    labels: dict[str | None, str] = {}
    if isinstance(functions, Mapping) and cache_key is not None:
        labels |= _labels_of_each(cache_key, functions, argument)
    elif cache_key is not None:
        # Without a function, the key stands for a version of the data.
        owner = None if functions is None else argument
        labels = dict.fromkeys(features, _label(cache_key, "cache_key", owner))
    sample = contents(source).encode()
    keys = {}
    for name, names in features.items():
        how = f"{len(source)} {labels.get(name, '')} {names}"
        keys[name] = digest(how.encode(), sample)
    return keys


def _labels_of_each(
    cache_key: str | Mapping[str, str], functions: Mapping[str, Any], argument: str
) -> dict[str, str]:
    """Returns the text that stands for each of several functions, by name."""
    if not isinstance(cache_key, Mapping) or set(cache_key) != set(functions):
        raise ValueError(
            f"`cache_key={cache_key!r}` must be a mapping with a name for each "
            f"function in `{argument}`, such as {_example(functions)}."
        )
    labels = {
        name: _label(key, f"cache_key[{name!r}]", argument)
        for name, key in cache_key.items()
    }
    if len(set(labels.values())) < len(labels):
        raise ValueError(
            f"`cache_key={dict(cache_key)}` gives two functions the same name, and "
            f"their files would be the same. Pass different names, such as "
            f"{_example(functions)}."
        )
    return labels


def _label(key: Any, name: str, argument: str | None) -> str:
    """Returns the text that stands for a function, or for a version of the data."""
    if isinstance(key, Mapping):
        raise ValueError(
            f"`{name}={dict(key)}` is a mapping, which requires a mapping of functions "
            "as well. Pass a string."
        )
    if not isinstance(key, str) or not key:
        raise ValueError(
            f'`{name}={key!r}` must be a non-empty string, such as "words-1".'
        )
    return repr((argument, key))


def _missing_message(
    cache: str | os.PathLike[str], functions: Any, argument: str
) -> str:
    if isinstance(functions, Mapping):
        return (
            f"`cache={str(cache)!r}` requires `cache_key`: the cache cannot detect "
            f"changes of the functions in `{argument}`. Pass a name for each, such as "
            f"`cache_key={_example(functions)}`, and change it whenever the function "
            "changes."
        )
    return (
        f"`cache={str(cache)!r}` requires `cache_key`: the cache cannot detect changes "
        f"of `{argument}`. Pass a name for the function, such as "
        f'`cache_key="{argument}-1"`, and change it whenever the function changes.'
    )


def _example(functions: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{name}-1" for name in functions}
