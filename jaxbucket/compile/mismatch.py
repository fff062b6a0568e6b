"""How a batch or a state differs from what was compiled for, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.compile.program import Label

_REMEDY = {
    "batch": "Convert the batch, or make `batch_specs` from an example like it.",
    "state": "Give back a state as it was, or compile for this one.",
}
_MAX_LENGTH = 80


def check_is_batch(name: str, batch: Any) -> None:
    """Raises a ValueError if this is not a batch."""
    if not isinstance(batch, Batch):
        raise ValueError(
            f"`{name}` is a {type(batch).__name__}, not a `jaxbucket.Batch`: pass what "
            "`prefetch_to_mesh` gives."
        )


def batch_difference(batch: Batch, specs: Mapping[Bucket, Batch]) -> str | None:
    """Says how a batch differs from the plan; None if it does not."""
    bucket = batch.bucket
    if bucket not in specs:
        planned = ", ".join(map(str, specs))
        return (
            f"A batch of shape {bucket} is outside the plan, which has {planned}. Pass "
            "global batches of this plan, or compile for another one."
        )
    return _difference("batch", batch, specs[bucket], bucket)


def state_difference(state: Any, spec: Any, label: Label) -> str | None:
    """Says how a state differs from what was compiled for; None if it does not."""
    return _difference("state", state, spec, label)


def _difference(kind: str, tree: Any, spec: Any, label: Label) -> str | None:
    now, then = avals(tree), avals(spec)
    if now != then:
        return f"{_changed_leaf(kind, now, then, label)} {_REMEDY[kind]}"
    constant = _changed_constant(jax.tree.structure(tree), jax.tree.structure(spec))
    if constant is None:
        return None
    owner, value, expected = constant
    return (
        f"A constant of `{owner}` in `{kind}` is {_short(value)}, but {label} was "
        f"compiled for {_short(expected)}. {_REMEDY[kind]}"
    )


def _changed_leaf(
    kind: str, now: dict[str, str], then: dict[str, str], label: Label
) -> str:
    name = min(name for name in now | then if now.get(name) != then.get(name))
    if name not in then:
        return f"`{kind}{name}` was not there when {label} was compiled."
    aval = now.get(name, "missing")
    return f"`{kind}{name}` is {aval}, but {label} was compiled for {then[name]}."


def avals(tree: Any) -> dict[str, str]:
    """The path of each leaf -> its dtype and shape."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path): _aval(leaf) for path, leaf in leaves}


def _aval(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        return f"a {type(leaf).__name__}"
    return f"{leaf.dtype}{list(leaf.shape)}"


def _changed_constant(tree: Any, spec: Any) -> tuple[str, Any, Any] | None:
    """The first node whose static data differ: its type, its data and the expected."""
    if tree == spec:
        return None
    now, then = tree.node_data(), spec.node_data()
    if now is None or then is None or now[0] is not then[0]:
        return "state", now, then
    children = tree.children(), spec.children()
    if now[1] == then[1] or len(children[0]) != len(children[1]):
        for pair in zip(*children, strict=False):
            if (constant := _changed_constant(*pair)) is not None:
                return constant
    # A dataclass has its static fields in a tuple.
    if isinstance(now[1], tuple) and isinstance(then[1], tuple):
        for pair in zip(now[1], then[1], strict=False):
            if pair[0] != pair[1]:
                return now[0].__name__, *pair
    return now[0].__name__, now[1], then[1]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."
