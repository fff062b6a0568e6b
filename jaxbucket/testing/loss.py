"""Whether a loss is a sum over rows, shown on one batch in several forms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import numpy as np
import optax

from jaxbucket.base.batch import Batch
from jaxbucket.testing.batches import shortened
from jaxbucket.testing.variants import (
    filled_rows,
    is_packed,
    take_rows,
    with_empty_rows,
    with_more_columns,
    with_other_padding,
    without_neighbours,
)
from jaxbucket.train.global_rows import MappedRows, rows_context
from jaxbucket.train.gradients import gradient_sums
from jaxbucket.train.loss import row_keys
from jaxbucket.train.state import create_state

_HALVES = MappedRows(("halves of the batch",))

_REMEDIES = {
    "with its rows in another order": (
        "What a row gives may depend on its features and its key, not on its place. "
        "Draw dropout row by row, by `jax.vmap` over `keys`, and number rows by "
        "`jaxbucket.train.row_numbers(batch)`."
    ),
    "in two halves, as on two devices": (
        "It looks at other rows, or returns a mean: return sums over the rows it is "
        "given, get those of all devices by `jaxbucket.train.gather_rows(x)`, and the "
        "places of its own among them by `jaxbucket.train.row_numbers(batch)`."
    ),
    "beside a device that has only empty rows": (
        "Empty rows count: multiply by `batch.mask`, and divide by nothing that is 0 "
        "where every row is empty."
    ),
    "with other values in its padding": (
        "Padding counts: multiply what is summed by `batch.mask`, and let no position "
        "attend to where `batch.segment_ids` is 0, nor to rows that are empty."
    ),
    "with as many columns again, all of padding": (
        "T counts: take no mean over an axis of T, nor T for a weight, but sums and "
        "counts of `batch.mask`. A model with a table of T places needs a batch that "
        "is at most half as long."
    ),
    "with every packed example in a row of its own": (
        "Examples that share a row see each other: take targets from "
        "`jaxbucket.next_tokens`, places from `batch.positions`, a mean over each "
        'example from `token_weights(batch, "sequence")`, and attention within '
        "`batch.segment_ids`, as `segment_attention` has it."
    ),
}


def check_loss(
    loss_fn: Callable[..., tuple],
    model: Any,
    batch: Batch,
    *,
    seed: int | None = 0,
    sequences: Collection[str] | None = None,
    tolerance: float = 1e-4,
) -> None:
    """Checks that a loss is a sum over rows, however they are spread over devices.

    Loss, weight, all further sums and the gradients of a batch must be finite, and the
    same with its rows in another order, in two halves as on two devices, beside a
    device that has only empty rows, with other values where it is padding, with as many
    columns again, all of padding, and with every packed example in a row of its own.
    The halves are mapped over one device, with an axis for `gather_rows`. The last two
    are compared with keys None, because what is drawn for a row depends on its T, and
    left out for a loss that fails without keys.

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
      loss_fn: the loss, see the top of `jaxbucket.train.loss`.
      model: an NNX module, or parameters.
      batch: a real one of at least two rows that hold examples, padded or packed, of
        numpy or jax. A small one will do.
      seed: what the keys of the rows are derived from; None to call the loss with keys
        None, as evaluation does.
      sequences: the features that are padded, by default all of shape `[B, T, ...]`.
        Name them where others may have that shape by chance.
      tolerance: by how much results may differ, relative to what the halves of the
        batch have, which may cancel. Models that compute in half precision need 1e-2.

    Raises:
      AssertionError: if results differ, with what differs and how to mend it; if they
        are not finite.
      ValueError: if the batch has fewer than two rows with examples, or the loss
        breaks the contract.
    """
    batch = _checked_batch(batch)
    num_rows = batch.bucket.batch_size
    rows = np.arange(num_rows)
    # Keys of as many rows again, which are empty.
    keys = None if seed is None else row_keys(seed, 0, 0, 2 * num_rows)
    results = _Results(loss_fn, model)
    expected = results.whole(batch, _take(keys, rows))
    _check_finite(expected)
    halves = results.of_halves(batch, _take(keys, rows))
    scale = jax.tree.map(_scale, halves)

    def check(how: str, got: Any) -> None:
        differences = [
            *_differing_sums(got[1], expected[1], scale[1], tolerance),
            *_differing_gradients(got[0], expected[0], scale[0], tolerance),
        ]
        if differences:
            raise AssertionError(
                f"`loss_fn` gives something else for the batch {how}: "
                f"{shortened(differences, '; ')}. {_REMEDIES[how]}"
            )

    order = np.random.default_rng(0).permutation(num_rows)
    if np.array_equal(order, rows):
        order = rows[::-1]
    reordered = results.whole(take_rows(batch, order), _take(keys, order))
    check("with its rows in another order", reordered)
    check("in two halves, as on two devices", _added(halves))
    beside_empty = with_empty_rows(batch, num_rows)
    halves = results.of_halves(beside_empty, keys)
    check("beside a device that has only empty rows", _added(halves))
    refilled = with_other_padding(beside_empty, sequences)
    check("with other values in its padding", _added(results.of_halves(refilled, keys)))
    if seed is not None:
        try:
            expected = results.whole(batch, None)
        except Exception:
            return
    longer = with_more_columns(batch, sequences)
    how = "with as many columns again, all of padding"
    check(how, results.whole(longer, None))
    if is_packed(batch):
        alone = without_neighbours(batch, sequences)
        how = "with every packed example in a row of its own"
        check(how, results.whole(alone, None))


def _checked_batch(batch: Batch) -> Batch:
    """A copy of the batch, of an even number of rows."""
    if not isinstance(batch, Batch):
        raise ValueError(
            f"`batch` is a {type(batch).__name__}: give one `jaxbucket.Batch`."
        )
    batch = jax.tree.map(np.array, batch)
    filled = filled_rows(batch)
    if filled.sum() < 2:
        raise ValueError(
            f"`batch` has {filled.sum()} rows with examples, of which nothing can be "
            "told: give one of at least two."
        )
    return with_empty_rows(batch, 1) if len(filled) % 2 else batch


class _Results:
    """The gradients and sums of a loss, `(gradients, sums)`, for batches and keys."""

    def __init__(self, loss_fn: Callable[..., tuple], model: Any):
        self._state = create_state(model, optax.identity())
        gradients = gradient_sums(loss_fn)

        def of_half(state: Any, batch: Batch, keys: Any) -> Any:
            with rows_context(_HALVES):
                return gradients(state, batch, keys)

        mapped = jax.vmap(of_half, in_axes=(None, 0, 0), axis_name=_HALVES.axes[0])
        self._whole, self._halves = jax.jit(gradients), jax.jit(mapped)

    def whole(self, batch: Batch, keys: Any) -> Any:
        """Those of all rows."""
        return self._whole(self._state, batch, keys)

    def of_halves(self, batch: Batch, keys: Any) -> Any:
        """Those of the first and of the last half of the rows, `[2, ...]`."""
        halves = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), (batch, keys))
        return self._halves(self._state, *halves)


def _take(keys: Any, rows: np.ndarray) -> Any:
    return None if keys is None else keys[rows]


def _added(of_halves: Any) -> Any:
    return jax.tree.map(lambda x: x[0] + x[1], of_halves)


def _check_finite(results: Any) -> None:
    gradients, sums = results
    infinite = [f"{name!r} is {x}" for name, x in sums.items() if not np.isfinite(x)]
    infinite += [
        f"the gradient of {jax.tree_util.keystr(path)}"
        for path, x in jax.tree.leaves_with_path(gradients)
        if not np.isfinite(x).all()
    ]
    if infinite:
        raise AssertionError(
            "`loss_fn` is not finite for the batch as it is: "
            f"{shortened(infinite, '; ')}. "
            "Look for a division by 0, or a logarithm of it, where a row is padding, "
            "and choose by `jnp.where` what goes in as well as what comes out."
        )


def _scale(of_halves: Any) -> float:
    """What rounding is relative to, also where the halves cancel."""
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
        # Sums of integers wrap around, and are exact all the same.
        exact = want.dtype.kind in "iu"
        if got != want if exact else not _close(got, want, tolerance, scale[name]):
            yield f"{name!r} is {got:.7g}, not {want:.7g}"


def _differing_gradients(
    results: Any, expected: Any, scale: Any, tolerance: float
) -> Iterator[str]:
    scales = jax.tree.leaves(scale)
    # One that is 0 but for rounding is that only beside the others.
    floor = 1e-2 * max(scales, default=0.0)
    for (path, x), y, of_halves in zip(
        jax.tree.leaves_with_path(expected),
        jax.tree.leaves(results),
        scales,
        strict=True,
    ):
        want, got = np.asarray(x, np.float64), np.asarray(y, np.float64)
        if not _close(got, want, tolerance, max(floor, of_halves)):
            apart = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
            off = f"off by {apart:.1%}" if np.isfinite(apart) else "not finite"
            yield f"the gradient of {jax.tree_util.keystr(path)} is {off}"


def _close(got: np.ndarray, want: np.ndarray, tolerance: float, floor: float) -> bool:
    """Whether they are, and are finite."""
    return bool(
        np.linalg.norm(got - want) <= tolerance * max(np.linalg.norm(want), floor)
    )
