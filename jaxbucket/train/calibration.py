"""Step times and compile times on this machine, measured on a few shapes.

A few shapes are enough to predict the time of all others, because the time of a step is
a sum of three terms (`StepTime`). The measurement lets you plan by time:

    shapes = calibration_shapes(limits, lengths)
    measured = calibrate(step_fn, state, shapes, source[0], mesh)
    limits = dataclasses.replace(limits, cost_fn=measured.cost)
    plan_curve(lengths, limits, compile_seconds=measured.seconds_per_compile)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_lengths, check_positive
from jaxbucket.base.progress import progress_bar
from jaxbucket.compile.steps import compile_steps
from jaxbucket.data.collate import collate_rows
from jaxbucket.data.example import Example, as_arrays
from jaxbucket.data.sequence_axes import sequence_axes
from jaxbucket.plan.costs import StepTime
from jaxbucket.plan.limits import Limits
from jaxbucket.sharding import (
    DATA_AXIS,
    Axes,
    batch_specs,
    local_rows,
    prefetch_to_mesh,
)

_T = TypeVar("_T")

# The percentile of lengths that approximates the shortest bucket of a plan.
_SHORT_PERCENTILE = 5
_NUM_LENGTHS = 6
# The small shape has 1 / 4 of the budget, which still keeps a device busy.
_SMALL_PART = 4


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Step times and compile times of several shapes.

    Attributes:
      step_seconds: bucket -> median seconds per step.
      compile_seconds: bucket -> seconds to trace and compile the step; close to zero if
        the same step was compiled for this bucket before.
    """

    step_seconds: dict[Bucket, float]
    compile_seconds: dict[Bucket, float]

    @functools.cached_property
    def cost(self) -> StepTime:
        """The step time of any shape, for `cost_fn` of a plan."""
        return StepTime.fit(self.step_seconds)

    @property
    def seconds_per_compile(self) -> float:
        """The median compile time, because the first compilation is slower."""
        return float(np.median(list(self.compile_seconds.values())))

    def to_dict(self) -> dict[str, Any]:
        """Returns all measurements and the fitted cost as plain Python values."""
        return {
            "shapes": [
                {
                    "bucket": bucket.to_list(),
                    "step_seconds": seconds,
                    "compile_seconds": self.compile_seconds[bucket],
                }
                for bucket, seconds in self.step_seconds.items()
            ],
            "cost": self.cost.to_dict(),
            "seconds_per_compile": self.seconds_per_compile,
        }


def calibration_shapes(limits: Limits, lengths: ArrayLike) -> list[Bucket]:
    """Returns a few shapes whose times determine the time of all shapes of a plan.

    Up to six shapes use the whole budget, with T in constant ratio from the shortest to
    the longest T that a plan may use. One more shape uses a quarter of the budget. It
    separates the constant time of a step from the time per token. Duplicates are
    removed.

    Example:
      >>> limits = Limits(max_tokens=8192, seq_len_multiple=32)
      >>> print(*calibration_shapes(limits, range(20, 1000)))
      [85, 96] [64, 128] [36, 224] [23, 352] [13, 608] [8, 1024] [21, 96]

    Args:
      limits: the limits of every shape.
      lengths: `[N]` integers, one per example.

    Raises:
      ValueError: if `plan_buckets` does not accept the lengths or limits.
    """
    lengths = check_lengths(lengths)
    candidates = limits.candidates(lengths)
    shortest = min(np.percentile(lengths, _SHORT_PERCENTILE), candidates.seq_lens[-1])
    wanted = np.geomspace(shortest, candidates.seq_lens[-1], _NUM_LENGTHS)
    # The slack keeps rounding errors from skipping a candidate that is hit exactly.
    places = np.searchsorted(candidates.seq_lens, wanted * (1 - 1e-12))
    chosen = candidates.take(np.unique(np.minimum(places, len(candidates) - 1)))
    batch_sizes = limits.batch_sizes(chosen.seq_lens).tolist()
    shapes = list(map(Bucket, batch_sizes, chosen.seq_lens.tolist()))
    # The shortest T has the most rows, so rounding a quarter of them matters least.
    multiple = limits.batch_size_multiple
    rows = shapes[0].batch_size // _SMALL_PART // multiple * multiple
    small = Bucket(max(rows, multiple), shapes[0].seq_len)
    return shapes if small in shapes else [*shapes, small]


def calibrate(
    step_fn: Callable[[Any, Batch], Any],
    state: Any,
    shapes: Iterable[Bucket],
    example: Example,
    mesh: Mesh,
    *,
    repeats: int = 5,
    batch_axes: Axes = DATA_AXIS,
    sequences: Sequence[str] | None = None,
    progress: bool = True,
) -> Calibration:
    """Compiles a step for several shapes, and times it on full batches.

    Steps are dispatched as in a training loop: each one while the previous one is still
    running. The shapes take turns, so that other load on the machine affects all of
    them. The first round is not counted. All processes of a mesh must call this
    function. Their measurements differ, so all of them should plan with the
    measurements of the same process.

    Example:
      >>> import jaxbucket as jb
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> def step_fn(state, batch):
      ...     return state + 1, {"num_tokens": batch.num_tokens}
      >>> shapes = [Bucket(4, 8), Bucket(2, 16)]
      >>> state, example = jb.sharding.replicate(0, mesh), {"x": [1, 2]}
      >>> measured = calibrate(step_fn, state, shapes, example, mesh, repeats=1)
      >>> list(measured.step_seconds) == shapes and measured.cost(8, 8) > 0
      True

    Args:
      step_fn: `(state, batch) -> (state, metrics)`, jitted or not, as for
        `compile_steps`. It may donate its state.
      state: the first state, on the mesh. It is not donated: steps run on a copy, which
        needs the same amount of memory again.
      shapes: the shapes to time, such as those of `calibration_shapes`.
      example: any example of the source; batches contain it truncated or repeated.
      mesh: the mesh on which batches are sharded.
      repeats: how often each shape is timed.
      batch_axes: the mesh axes over which rows are sharded.
      sequences: the features that are padded, by default all with a leading axis.
      progress: whether to show progress bars on a terminal.

    Returns:
      The step times and compile times of the shapes.

    Raises:
      ValueError: if `shapes` is empty or has duplicates; if the batch axes do not
        divide a B; if the example is empty; or if `step_fn` does not return a state and
        metrics.
    """
    if hasattr(step_fn, "compile_steps"):
        raise ValueError(
            "`step_fn` takes several micro-batches. Calibrate a step of a single batch "
            "instead: `make_train_step` without `accumulate`."
        )
    repeats = check_positive("repeats", repeats)
    shapes = _checked_shapes(shapes)
    specs = {}
    for shape in shapes:
        specs |= batch_specs(
            BucketPlan.from_shapes([(shape.batch_size, shape.tokens_per_row)]),
            example,
            mesh,
            batch_axes=batch_axes,
            sequences=sequences,
        )
    shard = local_rows(mesh, batch_axes=batch_axes)
    batches = [
        _full_batch(
            example, Bucket(len(shard.rows(b.batch_size)), b.seq_len), sequences
        )
        for b in shapes
    ]
    # A single worker, because parallel compilations would slow each other down.
    steps = compile_steps(step_fn, state, specs, workers=1, progress=progress)
    rounds = itertools.chain.from_iterable([batches] * (repeats + 1))
    seconds = _time_steps(
        steps,
        _copy(state),
        prefetch_to_mesh(
            _tracked(rounds, len(batches) * (repeats + 1), progress),
            mesh,
            batch_axes=batch_axes,
        ),
    )
    round_seconds = np.reshape(seconds, (repeats + 1, len(shapes)))[1:]
    medians = np.median(round_seconds, axis=0).tolist()
    return Calibration(dict(zip(shapes, medians, strict=True)), steps.seconds)


def _checked_shapes(shapes: Iterable[Bucket]) -> list[Bucket]:
    shapes = list(shapes)
    if not shapes:
        raise ValueError(
            "`shapes` is empty. Pass at least one shape, such as those of "
            "`calibration_shapes`."
        )
    for shape in shapes:
        if not isinstance(shape, Bucket):
            raise ValueError(
                f"`shapes` contains {shape!r}. Pass `Bucket(batch_size, seq_len)`."
            )
        if not isinstance(shape.seq_len, int):
            raise ValueError(
                f"`shapes` contains {shape}, but calibration requires shapes with a "
                "single T. Plan for several sequences with your own `cost_fn`."
            )
        if shapes.count(shape) > 1:
            raise ValueError(
                f"`shapes` contains {shape} more than once. Remove the duplicate."
            )
    return shapes


def _full_batch(
    example: Example, bucket: Bucket, sequences: Sequence[str] | None
) -> Batch:
    """Returns a batch without padding, whose rows all repeat one example."""
    arrays = as_arrays(example)
    for name in sequence_axes(arrays, sequences):
        value = arrays[name]
        if not len(value):
            raise ValueError(
                f"`example` has an empty {name!r}. Pass an example whose sequences are "
                "not empty."
            )
        arrays[name] = np.resize(value, (bucket.tokens_per_row, *value.shape[1:]))
    return collate_rows([arrays] * bucket.batch_size, bucket, sequences=sequences)


def _copy(state: Any) -> Any:
    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.device_put(leaf, leaf.sharding, may_alias=False)

    return jax.tree.map(copy, state)


def _tracked(items: Iterable[_T], total: int, progress: bool) -> Iterator[_T]:
    with progress_bar(progress) as bar:
        yield from bar.track(items, total, description="Timing steps")


def _time_steps(
    steps: Callable[[Any, Batch], Any], state: Any, batches: Iterable[Batch]
) -> list[float]:
    """Returns the seconds of each step, from the end of the previous one to its end."""
    jax.block_until_ready(state)
    ends: list[Future[float]] = []
    start = time.perf_counter()
    # A separate thread records when a step ends, because some backends run it within
    # the call that dispatches it, and others long after.
    with ThreadPoolExecutor(1) as waiter:
        for batch in batches:
            state, metrics = _checked_result(steps(state, batch))
            ends.append(waiter.submit(_end, metrics))
            if len(ends) > 1:
                ends[-2].result()
    return np.diff([end.result() for end in ends], prepend=start).tolist()


def _checked_result(result: Any) -> tuple[Any, Any]:
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(
            f"`step_fn` returned a value of type {type(result).__name__}. Return "
            "(state, metrics)."
        )
    # Only metrics can be waited for, because the state may be donated to the next step.
    if not jax.tree.leaves(result[1]):
        raise ValueError(
            "`step_fn` returned no metrics, so that its end cannot be observed. Return "
            "(state, metrics) with at least one array, such as the loss."
        )
    return result


def _end(metrics: Any) -> float:
    jax.block_until_ready(metrics)
    return time.perf_counter()
