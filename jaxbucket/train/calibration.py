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
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
from jaxbucket.data.example import Example
from jaxbucket.data.example_spec import ExampleSpec
from jaxbucket.plan.candidates import Candidates
from jaxbucket.plan.costs import StepTime
from jaxbucket.plan.limits import Limits
from jaxbucket.sharding.global_batch import batch_specs, prefetch_to_mesh
from jaxbucket.sharding.mesh import Axes, local_rows

# The percentile of lengths that approximates the shortest bucket of a plan.
_SHORT_PERCENTILE = 5
_NUM_LENGTHS = 6
# The small shape has 1 / 4 of the budget, which still keeps a device busy.
_SMALL_PART = 4
# The number of steps that are timed together: each is dispatched while the previous one
# is running, as in a training loop.
_STEPS = 3


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
    candidates = Candidates.of(lengths, limits)
    shortest = min(np.percentile(lengths, _SHORT_PERCENTILE), candidates.seq_lens[-1])
    wanted = np.geomspace(shortest, candidates.seq_lens[-1], _NUM_LENGTHS)
    # The slack keeps rounding errors from skipping a candidate that is hit exactly.
    places = np.searchsorted(candidates.seq_lens, wanted * (1 - 1e-12))
    chosen = candidates.take(np.unique(np.minimum(places, len(candidates) - 1)))
    batch_sizes = limits.batch_sizes(chosen.seq_lens).tolist()
    shapes = list(map(Bucket, batch_sizes, chosen.seq_lens.tolist()))
    # The shortest T has the most rows, so rounding a quarter of them matters least.
    multiple = int(limits.batch_multiples(chosen.seq_lens)[0])
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
    batch_axes: Axes = None,
    sequences: Sequence[str] | None = None,
    progress: bool = True,
) -> Calibration:
    """Compiles a step for several shapes, and times it on full batches.

    The shapes take turns, a few steps at a time, so that other load on the machine
    affects all of them. The first round is not counted. All processes of a mesh must
    call this function. Their measurements differ, so all of them should plan with the
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
      batch_axes: the mesh axes over which batches are sharded, as for
        `batch_sharding`.
      sequences: the features that are padded, by default all with a leading axis.
      progress: whether to show progress bars on a terminal.

    Returns:
      The step times and compile times of the shapes.

    Raises:
      ValueError: if `shapes` is empty, or one has a T for each of several sequences; if
        the batch axes do not divide a B; or if `step_fn` takes several micro-batches.
    """
    repeats = check_positive("repeats", repeats)
    shapes = list(shapes)
    if not shapes or not all(isinstance(x.seq_len, int) for x in shapes):
        raise ValueError(
            f"`shapes={shapes}` must be at least one `Bucket(batch_size, seq_len)` "
            "with a single T. Plan for several sequences with your own `cost_fn`."
        )
    specs = {}
    for shape in shapes:
        specs |= batch_specs(
            BucketPlan.from_shapes([(shape.batch_size, shape.tokens_per_row)]),
            example,
            mesh,
            batch_axes=batch_axes,
            sequences=sequences,
        )
    # A single worker, because parallel compilations would slow each other down.
    steps = compile_steps(step_fn, state, specs, workers=1, progress=progress)
    shard = local_rows(mesh, batch_axes=batch_axes)
    local = (
        _full_batch(example, len(shard.of(x).rows(x.batch_size)), x, sequences)
        for x in shapes
    )
    batches = list(prefetch_to_mesh(local, mesh, batch_axes=batch_axes, buckets=shapes))
    seconds: list[list[float]] = []
    state = _copy(state)
    with progress_bar(progress) as bar:
        for _ in bar.track(range(repeats + 1), description="Timing steps"):
            times = []
            for batch in batches:
                state, elapsed = _time_steps(steps, state, batch)
                times.append(elapsed)
            seconds.append(times)
    medians = np.median(seconds[1:], axis=0).tolist()
    return Calibration(dict(zip(shapes, medians, strict=True)), steps.seconds)


def _full_batch(
    example: Example, num_rows: int, bucket: Bucket, sequences: Sequence[str] | None
) -> Batch:
    """Returns a batch without padding, whose rows all repeat one example."""
    spec = ExampleSpec(example, sequences)
    arrays = spec.arrays
    for name in spec.axes:
        value = arrays[name]
        arrays[name] = np.resize(value, (bucket.tokens_per_row, *value.shape[1:]))
    local = Bucket(num_rows, bucket.seq_len)
    return collate_rows([arrays] * num_rows, local, sequences=sequences)


def _copy(state: Any) -> Any:
    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.device_put(leaf, leaf.sharding, may_alias=False)

    return jax.tree.map(copy, state)


def _time_steps(
    steps: Callable[[Any, Batch], Any], state: Any, batch: Batch
) -> tuple[Any, float]:
    """Returns the new state and the mean seconds of a step."""
    start, metrics = time.perf_counter(), None
    for _ in range(_STEPS):
        state, metrics = steps(state, batch)
    jax.block_until_ready((state, metrics))
    return state, (time.perf_counter() - start) / _STEPS
