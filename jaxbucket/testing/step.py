"""A check that a train step of one's own does not depend on the padding of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.testing.batches import shorten
from jaxbucket.testing.loss import REMEDIES, checked_batch, is_close
from jaxbucket.testing.variants import (
    PaddedFeatures,
    is_packed,
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
      ValueError: if the batch has fewer than two rows with examples, or the axes of a
        feature of several sequences with the same T are not known.
    """
    batch = checked_batch(batch)
    expected = _results(step_fn, state, batch)
    infinite = [x for x, value in expected.items() if not np.isfinite(value).all()]
    if infinite:
        raise AssertionError(
            f"`step_fn` returns values that are not finite: {shorten(infinite, '; ')}. "
            f"A softmax or a mean over an empty row may be the cause. {_EMPTY_ROWS}"
        )
    before = _numbers({"state": state})
    for variant, remedy, changed in _variants(batch, empty_rows, sequences):
        results = _results(step_fn, state, changed)
        differences = list(_differences(results, expected, before, tolerance))
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
    yield reorder, REMEDIES[reorder], take_rows(batch, np.arange(num_rows)[::-1])
    padded = batch
    if empty_rows:
        padded = with_empty_rows(batch, num_rows)
        yield "with as many empty rows", _EMPTY_ROWS, padded
    other = with_other_padding(padded, sequences)
    yield with_padding, REMEDIES[with_padding], other
    longer = with_more_columns(batch, sequences)
    yield with_columns, REMEDIES[with_columns], longer
    if is_packed(batch):
        yield alone, REMEDIES[alone], without_neighbors(batch, sequences)


def _results(
    step_fn: Callable[[Any, Any], Any], state: Any, batch: Batch
) -> dict[str, np.ndarray]:
    """Returns what a step returns and the state that it changed, by their paths."""
    given = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, state)
    returned = step_fn(given, batch)
    is_state = isinstance(returned, tuple) and len(returned) > 1
    first, rest = (returned[0], returned[1:]) if is_state else (returned, ())
    if jax.tree.structure(first) != jax.tree.structure(state):
        # The step has changed the state in place, or has none.
        first, rest = given, returned
    return _numbers({"state": first, "results": rest})


def _numbers(tree: Any) -> dict[str, np.ndarray]:
    """Returns the numbers of a pytree by their paths, except for donated arrays."""
    numbers = {}
    for path, x in jax.tree.leaves_with_path(tree):
        is_gone = isinstance(x, jax.Array) and x.is_deleted()
        if is_gone or not hasattr(x, "dtype"):
            continue
        # Neither keys nor the gradients of integers.
        if any(jax.dtypes.issubdtype(x.dtype, kind) for kind in (np.bool_, np.number)):
            numbers[jax.tree_util.keystr(path)] = np.asarray(x, np.float64)
    return numbers


def _differences(
    results: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    before: Mapping[str, np.ndarray],
    tolerance: float,
) -> Iterator[str]:
    """Yields the numbers of a state that changed differently, and other numbers."""
    changes = {name: x - before[name] for name, x in expected.items() if name in before}
    # A change that is 0 up to rounding is recognized by its size relative to others.
    floor = 1e-2 * max(map(np.linalg.norm, changes.values()), default=0.0)
    for name, want in expected.items():
        got, scale = results[name], floor
        if name in changes:
            got, want = got - before[name], changes[name]
        else:
            scale = np.linalg.norm(want)
        if got.shape != want.shape or not is_close(got, want, tolerance, scale):
            yield name
