"""What is not as it was compiled for, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import Bucket

_REMEDY = {
    "batch": "Convert the batch, or make `batch_specs` from an example like it.",
    "state": "Give back a state as it was, or compile for this one.",
}
_MOST_CHARACTERS = 80


def check_is_batch(name: str, batch: Any) -> None:
    """Raises a ValueError if it is something else."""
    if not isinstance(batch, Batch):
        raise ValueError(
            f"`{name}` is a {type(batch).__name__}, not a `jaxbucket.Batch`: pass what "
            "`prefetch_to_mesh` gives."
        )


def batch_difference(batch: Batch, specs: Mapping[Bucket, Batch]) -> str | None:
    """What is other than planned about a batch; None if nothing is."""
    bucket = batch.bucket
    if bucket not in specs:
        planned = ", ".join(map(str, specs))
        return (
            f"A batch of shape {bucket} is outside the plan, which has {planned}. Pass "
            "global batches of this plan, or compile for another one."
        )
    return _difference("batch", batch, specs[bucket], bucket)


def state_difference(state: Any, spec: Any, bucket: Any) -> str | None:
    """What is other than it was about a state; None if nothing is."""
    return _difference("state", state, spec, bucket)


def _difference(kind: str, got: Any, want: Any, bucket: Any) -> str | None:
    shapes, planned = _avals(got), _avals(want)
    if shapes != planned:
        return _of_leaves(kind, shapes, planned, bucket)
    nodes = _constants(jax.tree.structure(got), jax.tree.structure(want))
    if nodes is not None:
        of, now, then = nodes
        return (
            f"A constant of `{of}` in `{kind}` is {_short(now)}, but {bucket} was "
            f"compiled for {_short(then)}. {_REMEDY[kind]}"
        )
    return None


def _of_leaves(
    kind: str, got: dict[str, str], want: dict[str, str], bucket: Any
) -> str:
    name = min(name for name in got | want if got.get(name) != want.get(name))
    if name not in want:
        return (
            f"`{kind}{name}` was not there when {bucket} was compiled. {_REMEDY[kind]}"
        )
    return (
        f"`{kind}{name}` is {got.get(name, 'missing')}, but {bucket} was compiled for "
        f"{want[name]}. {_REMEDY[kind]}"
    )


def _avals(tree: Any) -> dict[str, str]:
    """What each array is called -> its dtype and shape."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        if hasattr(leaf, "dtype")
        else f"a {type(leaf).__name__}"
        for path, leaf in leaves
    }


def _constants(got: Any, want: Any) -> tuple[str, Any, Any] | None:
    """The first node whose static data differ: its type, these data and those."""
    if got == want:
        return None
    now, then = got.node_data(), want.node_data()
    pairs = zip(got.children(), want.children(), strict=False)
    if now is None or then is None or now[0] is not then[0]:
        return "state", now, then
    if now[1] == then[1] or len(got.children()) != len(want.children()):
        for a, b in pairs:
            found = _constants(a, b)
            if found is not None:
                return found
    if isinstance(now[1], tuple) and isinstance(then[1], tuple):
        # A dataclass has them as a tuple; the others are as they were.
        for a, b in zip(now[1], then[1], strict=False):
            if a != b:
                return now[0].__name__, a, b
    return now[0].__name__, now[1], then[1]


def _short(value: Any) -> str:
    text = repr(value)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}..."
