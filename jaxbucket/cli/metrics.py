"""The metrics that `jaxbucket analyze` measures, from the values of `--metric`."""

from __future__ import annotations

import functools
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxbucket.base.digest import digest
from jaxbucket.data.example import example_length
from jaxbucket.data.lengths.difficulty import Metric
from jaxbucket.data.lengths.functions import is_function_name, load_function
from jaxbucket.data.lengths.rarity import token_rarity
from jaxbucket.data.lengths.values import Measure, short_repr

# A name is that of a folder. A dot at its start is reserved for other files.
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")


class NamedMetric(NamedTuple):
    """A metric of the examples of a source.

    Attributes:
      function: function of an example, or an `AccumulatedMetric`.
      dtype: dtype of its values.
      key: a string that changes if the function is edited.
    """

    function: Metric
    dtype: str
    key: str


def parse_metrics(
    texts: tuple[str, ...], vocab_size: int | None, dtype: str
) -> dict[str, NamedMetric]:
    """Returns the metrics that `--metric` names.

    Args:
      texts: strings such as "length", "rarity=tokens" or "name=module:function".
      vocab_size: the value of `--vocab-size`.
      dtype: dtype of metrics from a module.

    Raises:
      ValueError: if a name is repeated, invalid or unknown, or a function is missing.
    """
    metrics: dict[str, NamedMetric] = {}
    for text in texts:
        name, _, what = text.partition("=")
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"`--metric {text}`: the name {name!r} cannot be that of a folder. Use "
                "letters, digits, dots, dashes and underscores."
            )
        if name in metrics:
            raise ValueError(
                f"`--metric {text}`: another metric is named {name!r}. Choose a "
                "different name."
            )
        if is_function_name(what):
            function = load_function(what)
            key = f"{text} {dtype} {_digest_of_module(what)}"
            metrics[name] = NamedMetric(function, dtype, key)
        else:
            metrics[name] = _built_in(name, what, vocab_size)
    if vocab_size is not None and not any(x in _RARITIES for x in metrics):
        raise ValueError(
            f"`--vocab-size {vocab_size}` has no effect without `--metric rarity` or "
            "`mean_rarity`. Remove it."
        )
    return metrics


_RARITIES = ("rarity", "mean_rarity")


def _built_in(name: str, feature: str, vocab_size: int | None) -> NamedMetric:
    if name == "length":
        function = functools.partial(_length, feature or None)
        return NamedMetric(function, "int32", f"length {feature}")
    if name not in _RARITIES:
        raise ValueError(
            f"`--metric {name}{feature and '=' + feature}`: choose length, rarity or "
            f"mean_rarity, or pass a function as {name}=module:function."
        )
    if vocab_size is None:
        raise ValueError(f"`--metric {name}` requires `--vocab-size`. Pass both.")
    rarity = token_rarity(
        feature or "tokens", vocab_size=vocab_size, mean=name == "mean_rarity"
    )
    return NamedMetric(rarity, "float32", f"{name} {feature} {vocab_size}")


def _length(feature: str | None, example: Any) -> int:
    if isinstance(example, Mapping):
        return example_length(example, feature and [feature])
    if feature is not None:
        raise ValueError(
            f"{short_repr(example)} is not a dict. Use `--metric length` without a "
            "feature."
        )
    return Measure().of_value(example)


def _digest_of_module(function: str) -> str:
    """Returns a digest of the file that defines `module:function`."""
    file = getattr(sys.modules[function.partition(":")[0]], "__file__", None)
    return digest(pathlib.Path(file).read_bytes() if file else b"")
