"""Messages about differences between a batch or state and the compiled one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket, ComponentBucket
from jaxbucket.compile.program import Label

_REMEDY = {
    "batch": "Convert the batch, or call `batch_specs` with an example like it.",
    "state": (
        "Pass a state with the same structure, shapes and dtypes as the compiled one, "
        "or compile again."
    ),
}
# Parts of a training state that evaluation does not need.
_OF_TRAINING = (".frozen", ".opt_state", ".loss_scale")
_FOR_EVALUATION = (
    "For evaluation or prediction, compile for `jb.create_state(state, mesh=mesh)`, "
    "which has neither an optimizer nor frozen parameters, and pass such states."
)
_MAX_LENGTH = 80


def check_is_batch(name: str, batch: Any) -> None:
    """Raises a ValueError if a value is not a batch."""
    if not isinstance(batch, Batch):
        raise ValueError(
            f"`{name}` is a {type(batch).__name__}, not a `jaxbucket.Batch`. Pass a "
            "batch from `prefetch_to_mesh`."
        )


def batch_difference(batch: Batch, specs: Mapping[Bucket, Batch]) -> str | None:
    """Returns how a batch differs from the plan, or None."""
    bucket = spec_bucket(batch, specs)
    if bucket not in specs:
        planned = ", ".join(map(str, specs))
        return (
            f"A batch of shape {bucket} is outside the plan, which has {planned}. Pass "
            "global batches of this plan, or compile for a plan with this shape."
        )
    return _difference("batch", batch, specs[bucket], bucket)


def padding_difference(batch: Batch, unpadded: Batch, target: Bucket) -> str | None:
    """Returns why a batch cannot be padded to the bucket `target`, or None.

    Args:
      batch: a batch of a smaller shape.
      unpadded: the shapes and dtypes of a batch of that shape that can be padded.
      target: a bucket of the plan.
    """
    needs = f"padding {batch.bucket} to {target} needs"
    return _difference("batch", batch, unpadded, target, needs)


def spec_bucket(batch: Batch, specs: Mapping[Bucket, Batch]) -> Bucket:
    """Returns the key of a batch in `specs`.

    This is its bucket, unless components of a mixture have keys of their own. Then it
    is the key of the features that the batch has.
    """
    bucket = batch.bucket
    components = [x for x in specs if isinstance(x, ComponentBucket)]
    if not components:
        return bucket
    arrays = avals(batch)
    return next((x for x in components if avals(specs[x]) == arrays), bucket)


def state_difference(state: Any, spec: Any, label: Label) -> str | None:
    """Returns how a state differs from the compiled one, or None."""
    return _difference("state", state, spec, label)


def _difference(
    kind: str, tree: Any, spec: Any, label: Label, needs: str | None = None
) -> str | None:
    needs = needs or f"{label} was compiled for"
    actual, expected = avals(tree), avals(spec)
    if actual != expected:
        names = actual | expected
        name = min(name for name in names if actual.get(name) != expected.get(name))
        remedy = _REMEDY[kind]
        if kind == "state" and name.startswith(_OF_TRAINING):
            remedy = f"{remedy} {_FOR_EVALUATION}"
        if name not in expected:
            changed = f"did not exist when {label} was compiled"
        else:
            changed = f"is {actual.get(name, 'missing')}, but {needs} {expected[name]}"
        return f"`{kind}{name}` {changed}. {remedy}"
    constant = _changed_constant(jax.tree.structure(tree), jax.tree.structure(spec))
    if constant is None:
        return None
    name, value, expected_value = constant
    values = repr(value), repr(expected_value)
    if all(" at 0x" in text for text in values):
        return (
            f"{name} in `{kind}` is another object than the one that {label} was "
            "compiled for. Reuse the same objects, such as `tx` and `apply_fn` of "
            "Flax's `TrainState`, or compile again."
        )
    short, expected_short = map(_short, values)
    return (
        f"{name} in `{kind}` is {short}, but {needs} {expected_short}. {_REMEDY[kind]}"
    )


def avals(tree: Any) -> dict[str, str]:
    """Returns the path of each leaf -> its dtype and shape."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path): _aval(leaf) for path, leaf in leaves}


def _aval(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        return f"a {type(leaf).__name__}"
    return f"{leaf.dtype}{list(leaf.shape)}"


def _changed_constant(tree: Any, spec: Any) -> tuple[str, Any, Any] | None:
    """Returns a name, the data and the expected data of the first node that differs."""
    if tree == spec:
        return None
    actual, expected = tree.node_data(), spec.node_data()
    if actual is None or expected is None or actual[0] is not expected[0]:
        return "A constant of `state`", actual, expected
    children = tree.children(), spec.children()
    if actual[1] == expected[1] or len(children[0]) != len(children[1]):
        for pair in zip(*children, strict=False):
            if (constant := _changed_constant(*pair)) is not None:
                return constant
    owner = actual[0]
    # The data of a dataclass is the tuple of its static fields.
    if isinstance(actual[1], tuple) and isinstance(expected[1], tuple):
        for index, pair in enumerate(zip(actual[1], expected[1], strict=False)):
            if pair[0] != pair[1]:
                return _field_name(owner, index), *pair
    return f"A constant of `{owner.__name__}`", actual[1], expected[1]


def _field_name(owner: Any, index: int) -> str:
    """Returns the name of a static field of a dataclass of Flax."""
    fields = getattr(owner, "__dataclass_fields__", {}).values()
    static = [x.name for x in fields if not x.metadata.get("pytree_node", True)]
    if index < len(static):
        return f"`{static[index]}` of `{owner.__name__}`"
    return f"A constant of `{owner.__name__}`"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."
