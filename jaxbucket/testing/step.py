"""A check that a train step of one's own does not depend on the padding of a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.testing.batches import shorten
from jaxbucket.testing.loss import REMEDIES, checked_batch, is_close
from jaxbucket.testing.variants import (
    PaddedFeatures,
    is_packed,
    other_order,
    take_rows,
    with_empty_rows,
    with_more_columns,
    with_other_padding,
    without_neighbors,
)

_EMPTY_ROWS = (
    "Empty rows count. Instead of a mean over all rows, divide a sum over those in "
    "`batch.row_mask` by their number, or a sum over tokens by that of real tokens. Or "
    'let no row be empty, with `BatchSchedule(remainder="repeat")`, and pass '
    "`empty_rows=False`."
)


_ORDER = (
    "Add sums over devices and micro-batches, and divide once, instead of averaging "
    "means. Turn dropout off for this check, as `model.eval()` does, and return no "
    "values of single rows."
)
_NUMBERS = np.bool_, np.number
# Metrics of the library's own steps that describe the shape of the batch.
_OF_SHAPES = ("['num_rows']", "['num_positions']", "['padding']")


def check_step(
    step_fn: Callable[[Any, Any], Any],
    state: Any,
    batch: Batch,
    *,
    empty_rows: bool = True,
    sequences: PaddedFeatures = None,
    tolerance: float = 1e-4,
) -> None:
    """Checks that a step of your own gives what examples without padding would.

    The step is called with the batch and with variants of it. What it returns, and the
    state if it changes that in place, must be finite and the same for

    - the rows in another order,
    - as many empty rows added,
    - different values in the padding,
    - twice as many columns, the new ones all padding,
    - every packed example in a row of its own.

    Use an optimizer such as `optax.sgd`: Adam divides a gradient by its own size, and
    so magnifies the rounding errors of one that is 0. Dropout must be off.

    Example: a mean over all rows counts the empty ones.
      >>> import jax.numpy as jnp
      >>> import jaxbucket as jb
      >>> def step_fn(w, batch):
      ...     x = jnp.where(batch.mask, batch.features["x"], 0)
      ...     return w - x.sum(axis=1).mean()
      >>> rows = [{"x": [1.0, 2.0]}, {"x": [3.0]}]
      >>> batch = jb.data.collate_rows(rows, jb.Bucket(2, 4))
      >>> try:
      ...     check_step(step_fn, jnp.float32(0), batch)
      ... except AssertionError as error:
      ...     print(str(error)[:54])
      `step_fn` returns different results for the batch with

    Args:
      step_fn: `(state, batch) -> results`, any pytree, such as a new state and metrics.
        For a step that takes another kind of batch, pass a function that converts it.
      state: the state, a pytree such as a tuple of an NNX model and an optimizer. The
        step gets a copy, which it may change or donate.
      batch: a real batch of numpy or jax arrays, padded or packed, with at least two
        rows that contain examples. A small batch is enough.
      empty_rows: whether a batch may have empty rows. Pass False if no batch has, as
        with `remainder="repeat"`; then none are added.
      sequences: the features that are padded, as for `check_loss`.
      tolerance: how much results may differ, relative to their size, or for a state to
        the size of its change. Numbers of 16 bits need about 0.05.

    Raises:
      AssertionError: if results differ, with the differences and a remedy; or if they
        are not finite.
      ValueError: if the batch has fewer than two rows with examples, the axes of a
        feature of several sequences with the same T are not known, or the step neither
        changes nor returns anything.
    """
    batch = checked_batch(batch)
    if not empty_rows and not batch.row_mask.all():
        raise ValueError("`empty_rows=False`, but `batch` has empty rows.")
    expected = _results(step_fn, state, batch)
    infinite = [name for name, (x, _) in expected.items() if not np.isfinite(x).all()]
    if infinite:
        raise AssertionError(
            f"`step_fn` returns values that are not finite: {shorten(infinite, '; ')}. "
            f"A softmax or a mean over an empty row may be the cause. {_EMPTY_ROWS}"
        )
    if not _is_comparable(expected.values()):
        raise ValueError(
            "`step_fn` changes no float of `state`, and returns nothing else, so there "
            "is nothing to compare. Return the loss, or use a learning rate above 0."
        )
    for variant, remedy, changed in _variants(batch, empty_rows, sequences):
        results = _results(step_fn, state, changed)
        differences = list(_differences(results, expected, tolerance))
        if differences:
            raise AssertionError(
                f"`step_fn` returns different results for the batch {variant}: "
                f"{shorten(differences, '; ')}. {remedy}"
            )


def _variants(
    batch: Batch, empty_rows: bool, sequences: PaddedFeatures
) -> Iterator[tuple[str, str, Batch]]:
    """Yields each variant of a batch, with its description and the remedy."""
    reorder, _, _, with_padding, with_columns, alone = REMEDIES
    num_rows = batch.bucket.batch_size
    yield reorder, _ORDER, take_rows(batch, other_order(num_rows))
    padded = batch
    if empty_rows:
        padded = with_empty_rows(batch, num_rows)
        yield "with as many empty rows", _EMPTY_ROWS, padded
    other = with_other_padding(padded, sequences)
    yield with_padding, REMEDIES[with_padding], other
    longer = with_more_columns(batch, sequences)
    yield with_columns, REMEDIES[with_columns], longer
    if is_packed(batch):
        apart = without_neighbors(batch, sequences)
        if empty_rows:  # As many rows as devices can share.
            apart = with_empty_rows(apart, -apart.bucket.batch_size % num_rows)
        yield alone, REMEDIES[alone], apart


def _results(
    step_fn: Callable[[Any, Any], Any], state: Any, batch: Batch
) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    """Returns all numbers after a step by their paths.

    They are those of the state that the step was given, which it may change in place,
    and of what it returns. With each number of a state comes that before the step.
    """
    given = jax.tree.map(_copy, state)
    numbers = map(_number, jax.tree.leaves(given))
    # Copied, because the step may change them in place.
    before = [None if x is None else np.array(x) for x in numbers]
    returned = step_fn(given, batch)
    structure = jax.tree.structure(state)
    first = returned[0] if isinstance(returned, tuple | list) and returned else returned

    def is_state(x: Any) -> bool:
        if jax.tree.structure(x) != structure or not structure.num_leaves:
            return False
        # A single array is recognized by its place.
        return structure.num_leaves > 1 or x is given or x is first

    found = {}
    tree = {"state": given, "results": returned}
    for path, part in jax.tree.leaves_with_path(tree, is_leaf=is_state):
        olds = before if is_state(part) else [None]
        for (inner, leaf), old in zip(
            jax.tree.leaves_with_path(part), olds, strict=False
        ):
            name = jax.tree_util.keystr((*path, *inner))
            if (x := _number(leaf)) is not None and not name.endswith(_OF_SHAPES):
                found[name] = x, old
    return found


def _is_comparable(
    numbers: Collection[tuple[np.ndarray, np.ndarray | None]],
) -> bool:
    """Returns whether a step returned a number, or changed one of its state."""
    olds = [(x, old) for x, old in numbers if old is not None]
    # A counter changes in any case.
    floats = [pair for pair in olds if pair[0].dtype.kind in "fc"] or olds
    is_returned = len(olds) < len(numbers)
    return is_returned or any(not np.array_equal(*pair) for pair in floats)


def _copy(x: Any) -> Any:
    return x.copy() if isinstance(x, jax.Array | np.ndarray) else x


def _number(x: Any) -> np.ndarray | None:
    """Returns a number as numpy compares it: integers, or floats of 64 bits.

    None for anything else, such as a random key, and for an array that was donated.
    """
    if isinstance(x, jax.Array) and x.is_deleted():
        return None
    if not hasattr(x, "dtype"):
        x = np.asarray(x) if isinstance(x, bool | int | float | complex) else None
    if x is None or not any(jnp.issubdtype(x.dtype, kind) for kind in _NUMBERS):
        return None
    if jnp.issubdtype(x.dtype, np.inexact):
        is_complex = jnp.issubdtype(x.dtype, np.complexfloating)
        return np.asarray(x, np.complex128 if is_complex else np.float64)
    return np.asarray(x)


def _differences(
    results: Mapping[str, tuple[np.ndarray, np.ndarray | None]],
    expected: Mapping[str, tuple[np.ndarray, np.ndarray | None]],
    tolerance: float,
) -> Iterator[str]:
    """Yields the numbers of a state that changed differently, and other numbers."""
    # A change that is 0 up to rounding is recognized by its size relative to others.
    sizes = [
        float(np.linalg.norm(x - old))
        for x, old in expected.values()
        if old is not None and x.dtype.kind in "fc"
    ]
    floor = 1e-2 * max(sizes, default=0.0)
    for name, (want, old) in expected.items():
        got = results[name][0]
        if want.dtype.kind not in "fc":
            # Counters and random numbers have no rounding errors.
            if not np.array_equal(got, want):
                yield name
            continue
        scale = float(np.linalg.norm(want)) if old is None else floor
        if old is not None:
            got, want = got - old, want - old
        if got.shape != want.shape or not is_close(got, want, tolerance, scale):
            yield name
