"""A check that a loss is a sum over rows, by comparing variants of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

import jax
import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.checks import check_choice, check_type
from jaxbucket.testing.batches import shorten
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
from jaxbucket.train.gradients import gradient_sums
from jaxbucket.train.modes import Mode, row_keys
from jaxbucket.train.state import TrainState, create_state

# Variant of the batch -> the likely mistake and its remedy, in the order of testing.
REMEDIES = {
    "with its rows reordered": (
        "The result of a row depends on its index, but may depend only on its features "
        "and its key. Draw dropout row by row, with `jax.vmap` over `keys`."
    ),
    "split into two halves, as on two devices": (
        "The loss uses other rows, or returns a mean. Return sums over the rows it is "
        "given. If it needs other rows, as for in-batch negatives or batch statistics, "
        'train with `mode="jit"`, and check it with `mode="jit"`.'
    ),
    "together with a device that has only empty rows": (
        "Empty rows count. Multiply by `batch.mask`, of one of several sequences "
        "`batch.segment_ids[name] > 0`, and do not divide by a number that is 0 if "
        "every row is empty."
    ),
    "with different values in its padding": (
        "Padding counts. Multiply by `batch.mask`, of one of several sequences "
        "`batch.segment_ids[name] > 0`, before summing, and do not attend to empty "
        "rows or to positions at which `batch.segment_ids` is 0. If an example lacks "
        "the keys of a query, set what it sees to zero. Set padding to zero before "
        "each convolution: `x * batch.mask[..., None]`."
    ),
    "with twice as many columns, the new ones all padding": (
        "The result depends on T. Use sums and counts of `batch.mask` instead of T or "
        "a mean over T. Set padding to zero before each convolution: "
        "`x * batch.mask[..., None]`. If the model has a table of T positions, pass a "
        "batch that is at most half as long."
    ),
    "with every packed example in a row of its own": (
        "Examples that share a row influence each other. Take targets from "
        "`jaxbucket.next_tokens`, positions from `batch.positions`, and the weights of "
        'a mean over each example from `token_weights(batch, "sequence")`; restrict '
        "attention to `batch.segment_ids`, as `segment_attention` does."
    ),
}


def check_loss(
    loss_fn: Callable[..., tuple],
    model: Any,
    batch: Batch,
    *,
    mode: Mode = "shard_map",
    seed: int | None = 0,
    sequences: PaddedFeatures = None,
    tolerance: float = 1e-4,
) -> None:
    """Checks that a loss is a sum over rows, independent of their layout over devices.

    The loss, its weight, all further sums and the gradients must be finite, and must be
    the same for these variants of the batch:

    - with its rows reordered,
    - split into two halves, as on two devices,
    - together with a device that has only empty rows,
    - with different values in its padding,
    - with twice as many columns, the new ones all padding,
    - with every packed example in a row of its own.

    The last two variants are compared with `keys=None`, because the random bits of a
    row depend on T. They are skipped if the loss fails without keys.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxbucket as jb
      >>> rows = [{"x": [1.0, 2.0]}, {"x": [3.0]}]
      >>> batch = jb.data.collate_rows(rows, jb.Bucket(2, 4))
      >>> def loss_fn(params, batch, keys):
      ...     losses = (params["w"] - batch.features["x"]) ** 2
      ...     return jnp.sum(losses, where=batch.mask), batch.num_tokens
      >>> check_loss(loss_fn, {"w": jnp.float32(0)}, batch)

    Args:
      loss_fn: the loss, as for `make_train_step`.
      model: an NNX module, parameters, or a `TrainState`.
      batch: a real batch of numpy or jax arrays, padded or packed, with at least two
        rows that contain examples. A small batch is enough.
      mode: the mode of the steps. With "jit", a loss is given the whole batch, so it
        may use other rows and change variables. It is not called with halves then,
        so a loss that returns a mean is not detected.
      seed: the seed of the rows' keys; None to call the loss with `keys=None`, as in
        evaluation.
      sequences: the features that are padded, by default all of shape `[B, T, ...]`,
        or `[B, T, T', ...]` with the T of several sequences. Pass their names if other
        features may have that shape by coincidence; or a mapping from each of several
        sequences to its features, as for `collate_rows`.
      tolerance: how much results may differ, relative to the results of the two halves
        of the batch (which may cancel in the sum). Models that compute in half
        precision need 1e-2.

    Raises:
      AssertionError: if results differ, with the differences and a remedy; or if they
        are not finite.
      ValueError: if the batch has fewer than two rows with examples, if the axes of a
        feature of several sequences with the same T are not known, or if the loss
        breaks the contract.
    """
    check_choice("mode", mode, get_args(Mode))
    batch = checked_batch(batch)
    if batch.bucket.batch_size % 2:
        batch = with_empty_rows(batch, 1)
    results = _Results(loss_fn, model, mode)
    for variant, actual, expected, scale in _variants(results, batch, seed, sequences):
        differences = [
            *_differing_sums(actual[1], expected[1], scale[1], tolerance),
            *_differing_gradients(actual[0], expected[0], scale[0], tolerance),
        ]
        if differences:
            raise AssertionError(
                f"`loss_fn` returns different results for the batch {variant}: "
                f"{shorten(differences, '; ')}. {REMEDIES[variant]}"
            )


def _variants(
    results: _Results, batch: Batch, seed: int | None, sequences: PaddedFeatures
) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yields each variant of a batch, its results, those expected, and their scale."""
    num_rows = batch.bucket.batch_size
    rows = np.arange(num_rows)
    # Twice as many keys, because empty rows are added below.
    keys = None if seed is None else row_keys(seed, 0, 2 * num_rows)
    expected = results.whole(batch, take_rows(keys, rows))
    _require_finite(expected)
    dealt = _dealt(batch)
    halves = results.of_halves(take_rows(batch, dealt), take_rows(keys, dealt))
    scale = jax.tree.map(_scale, halves)
    order = other_order(num_rows)
    reordered = results.whole(take_rows(batch, order), take_rows(keys, order))
    reorder, split, with_empty, with_padding, with_columns, alone = REMEDIES
    yield reorder, reordered, expected, scale
    yield split, _added(halves), expected, scale
    padded = with_empty_rows(batch, num_rows)
    yield with_empty, _added(results.of_halves(padded, keys)), expected, scale
    padded = with_other_padding(padded, sequences)
    yield with_padding, _added(results.of_halves(padded, keys)), expected, scale
    if seed is not None:
        try:
            expected = results.whole(batch, None)
        except Exception:
            return
    longer = with_more_columns(batch, sequences)
    yield with_columns, results.whole(longer, None), expected, scale
    if is_packed(batch):
        unpacked = without_neighbors(batch, sequences)
        yield alone, results.whole(unpacked, None), expected, scale


def _dealt(batch: Batch) -> np.ndarray:
    """Returns the rows, of which each half has half of those with examples."""
    filled, empty = (np.flatnonzero(batch.row_mask == x) for x in (True, False))
    middle = -(-len(filled) // 2)
    rest = batch.bucket.batch_size // 2 - middle
    return np.concatenate(
        [filled[:middle], empty[:rest], filled[middle:], empty[rest:]]
    )


def checked_batch(batch: Batch) -> Batch:
    """Returns a copy of the batch, after checking that it has two rows to compare."""
    check_type("batch", batch, Batch, "Pass a single batch.")
    batch = jax.tree.map(np.array, batch)
    filled = batch.row_mask
    if filled.sum() < 2:
        raise ValueError(
            f"`batch` has {filled.sum()} rows with examples, too few for a comparison. "
            "Pass a batch that has at least two."
        )
    return batch


class _Results:
    """Computes the `(gradients, sums)` of a loss for batches and keys."""

    def __init__(self, loss_fn: Callable[..., tuple], model: Any, mode: Mode):
        is_state = isinstance(model, TrainState)
        self._state = model if is_state else create_state(model)
        self._mode = mode
        sums = gradient_sums(loss_fn, updates_variables=mode == "jit")

        def gradients(state: TrainState, batch: Batch, keys: Any) -> Any:
            return sums(state, batch, keys)[0]

        mapped = jax.vmap(gradients, in_axes=(None, 0, 0))
        self._whole, self._halves = jax.jit(gradients), jax.jit(mapped)

    def whole(self, batch: Batch, keys: Any) -> Any:
        """Returns the results of all rows."""
        return self._whole(self._state, batch, keys)

    def of_halves(self, batch: Batch, keys: Any) -> Any:
        """Returns the results of the first and the second half of the rows, stacked.

        If the loss needs the whole batch, the first half is all of it.
        """
        if self._mode == "jit":
            whole = self.whole(batch, keys)
            return jax.tree.map(lambda x: np.stack([x, np.zeros_like(x)]), whole)
        halves = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), (batch, keys))
        return self._halves(self._state, *halves)


def _added(of_halves: Any) -> Any:
    return jax.tree.map(lambda x: x[0] + x[1], of_halves)


def _require_finite(results: Any) -> None:
    """Raises an AssertionError that names the results that are not finite."""
    gradients, sums = results
    infinite = [f"{name!r} is {x}" for name, x in sums.items() if not np.isfinite(x)]
    infinite += [
        f"the gradient of {jax.tree_util.keystr(path)}"
        for path, x in jax.tree.leaves_with_path(gradients)
        if not np.isfinite(x).all()
    ]
    if infinite:
        raise AssertionError(
            "`loss_fn` is not finite for the unchanged batch: "
            f"{shorten(infinite, '; ')}. "
            "Look for a division by 0 or a logarithm of 0 in padding, and apply "
            "`jnp.where` to the inputs of that operation as well as to its outputs."
        )


def _scale(of_halves: Any) -> float:
    """Returns the magnitude to which errors are relative, even if the halves cancel."""
    halves = np.asarray(of_halves, np.float64).reshape(2, -1)
    scale = np.linalg.norm(halves, axis=1).sum()
    return float(scale) if np.isfinite(scale) else 0.0


def _differing_sums(
    results: Any, expected: Any, scale: Any, tolerance: float
) -> Iterator[str]:
    for name, x in expected.items():
        if name in ("num_rows", "num_positions"):
            continue
        want, got = np.asarray(x), np.asarray(results[name])
        # Sums of integers are exact, even if they wrap around.
        exact = want.dtype.kind in "iu"
        if got != want if exact else not is_close(got, want, tolerance, scale[name]):
            yield f"{name!r} is {got:.7g}, not {want:.7g}"


def _differing_gradients(
    results: Any, expected: Any, scale: Any, tolerance: float
) -> Iterator[str]:
    scales = jax.tree.leaves(scale)
    # A gradient that is 0 up to rounding is recognized by its size relative to others.
    floor = 1e-2 * max(scales, default=0.0)
    for (path, x), y, of_halves in zip(
        jax.tree.leaves_with_path(expected),
        jax.tree.leaves(results),
        scales,
        strict=True,
    ):
        want, got = np.asarray(x, np.float64), np.asarray(y, np.float64)
        if not is_close(got, want, tolerance, max(floor, of_halves)):
            error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
            problem = f"off by {error:.1%}" if np.isfinite(error) else "not finite"
            yield f"the gradient of {jax.tree_util.keystr(path)} is {problem}"


def is_close(got: np.ndarray, want: np.ndarray, tolerance: float, floor: float) -> bool:
    """Returns whether two arrays are close and finite."""
    return bool(
        np.linalg.norm(got - want) <= tolerance * max(np.linalg.norm(want), floor)
    )
