"""What a step takes on this machine, measured on a few shapes: time, and compiling.

Few shapes say what all others take, for a step's time is a sum of three terms
(`StepTime`). A plan by time follows:

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
from jaxbucket.base.buckets import Bucket, BucketPlan
from jaxbucket.base.checks import check_lengths, check_positive
from jaxbucket.base.progress import progress_bar
from jaxbucket.compile import compile_steps
from jaxbucket.data.collate import collate_rows
from jaxbucket.data.example import Example, as_arrays, sequence_names
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

# Among lengths, the one near which the shortest bucket of a plan ends.
_SHORT_PERCENTILE = 5
_NUM_LENGTHS = 6
# Of the budget, what the small shape has: enough to keep a device as busy as others do.
_SMALL_PART = 4


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Step times and compile times of some shapes.

    Attributes:
      step_seconds: bucket -> what a step takes, the median of several.
      compile_seconds: bucket -> what it took to trace and compile it; next to nothing
        where this very step was compiled for it before.
    """

    step_seconds: dict[Bucket, float]
    compile_seconds: dict[Bucket, float]

    @functools.cached_property
    def cost(self) -> StepTime:
        """What a step of any shape takes: `cost_fn` of a plan."""
        return StepTime.fit(self.step_seconds)

    @property
    def seconds_per_compile(self) -> float:
        """The median: the first shape has to load what the others find loaded."""
        return float(np.median(list(self.compile_seconds.values())))

    def to_dict(self) -> dict[str, Any]:
        """Every number, as plain Python."""
        return {
            "shapes": [
                {
                    "bucket": [bucket.batch_size, bucket.seq_len],
                    "step_seconds": seconds,
                    "compile_seconds": self.compile_seconds[bucket],
                }
                for bucket, seconds in self.step_seconds.items()
            ],
            "cost": self.cost.to_dict(),
            "seconds_per_compile": self.seconds_per_compile,
        }


def calibration_shapes(limits: Limits, lengths: ArrayLike) -> list[Bucket]:
    """Returns the few shapes whose times say what those of a plan take.

    Six of the whole budget, from the shortest T that a plan may want to the longest,
    in constant ratio; and one of a quarter of it, which tells what a step takes however
    small it is from what its tokens take. Fewer, where there are not so many.

    Example:
      >>> limits = Limits(max_tokens=8192, seq_len_multiple=32)
      >>> print(*calibration_shapes(limits, range(20, 1000)))
      [85, 96] [64, 128] [36, 224] [23, 352] [13, 608] [8, 1024] [21, 96]

    Args:
      limits: what every shape keeps to.
      lengths: `[N]` integers, one per example.

    Raises:
      ValueError: for lengths or limits that `plan_buckets` refuses.
    """
    lengths = check_lengths(lengths)
    candidates = limits.candidates(lengths)
    shortest = min(np.percentile(lengths, _SHORT_PERCENTILE), candidates.seq_lens[-1])
    wanted = np.geomspace(shortest, candidates.seq_lens[-1], _NUM_LENGTHS)
    # Rounded: without the slack an end on a candidate can miss it.
    places = np.searchsorted(candidates.seq_lens, wanted * (1 - 1e-12))
    chosen = candidates.take(np.unique(np.minimum(places, len(candidates) - 1)))
    batch_sizes = limits.batch_sizes(chosen.seq_lens).tolist()
    shapes = list(map(Bucket, batch_sizes, chosen.seq_lens.tolist()))
    # Of the shortest there are the most rows, and so the most to choose from.
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
    """Compiles a step for each of some shapes, and times it on full batches.

    The steps are dispatched as in a training loop, the next one while the last is still
    running, and the shapes take turns, so that a busy moment meets all of them. The
    first turn is not counted. All processes of a mesh have to call it, and each has
    times of its own: let all plan by those of one.

    Args:
      step_fn: `(state, batch) -> (state, metrics)`, jitted or not, as for
        `compile_steps`. It may donate its state.
      state: the first state, on the mesh. It survives: steps are run on a copy, which
        takes as much memory again.
      shapes: which, such as those of `calibration_shapes`.
      example: any example of the source; batches are made of it, cut or repeated.
      mesh: where the rows go.
      repeats: how often each shape is timed.
      batch_axes: the mesh axes that cut the rows.
      sequences: as in `batch_dataset`.
      progress: show progress bars on a terminal.

    Raises:
      ValueError: if there are no shapes, or one is there twice; if the batch axes do
        not divide a B; for an empty example; for a step that returns anything else.
    """
    if hasattr(step_fn, "compile_steps"):
        raise ValueError(
            "`step_fn` takes several micro-batches: calibrate a step of one, such as "
            "that of `data_parallel`."
        )
    repeats = check_positive("repeats", repeats)
    shapes = _checked_shapes(shapes)
    specs = {}
    for shape in shapes:
        specs |= batch_specs(
            BucketPlan.from_shapes([(shape.batch_size, shape.seq_len)]),
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
    # One at a time, for what a compile takes is told, too.
    steps = compile_steps(step_fn, state, specs, workers=1, progress=progress)
    turns = itertools.chain.from_iterable([batches] * (repeats + 1))
    seconds = _time_steps(
        steps,
        _copy(state),
        prefetch_to_mesh(
            _tracked(turns, len(batches) * (repeats + 1), progress),
            mesh,
            batch_axes=batch_axes,
        ),
    )
    turn_seconds = np.reshape(seconds, (repeats + 1, len(shapes)))[1:]
    medians = np.median(turn_seconds, axis=0).tolist()
    return Calibration(dict(zip(shapes, medians, strict=True)), steps.seconds)


def _checked_shapes(shapes: Iterable[Bucket]) -> list[Bucket]:
    shapes = list(shapes)
    if not shapes:
        raise ValueError(
            "`shapes` is empty: pass those of `calibration_shapes`, or others."
        )
    for shape in shapes:
        if not isinstance(shape, Bucket):
            raise ValueError(
                f"`shapes` holds {shape!r}: make it a `Bucket(batch_size, seq_len)`."
            )
        if shapes.count(shape) > 1:
            raise ValueError(f"`shapes` holds {shape} twice: name each shape once.")
    return shapes


def _full_batch(
    example: Example, bucket: Bucket, sequences: Sequence[str] | None
) -> Batch:
    """A batch without padding, every row the example's, as long as the bucket."""
    arrays = as_arrays(example)
    for name in sequence_names(arrays, sequences):
        value = arrays[name]
        if not len(value):
            raise ValueError(
                f"`example` has an empty {name!r}: give one that has something to fill "
                "a batch with."
            )
        arrays[name] = np.resize(value, (bucket.seq_len, *value.shape[1:]))
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
    """Seconds from the end of the step before to the end of each."""
    jax.block_until_ready(state)
    ends: list[Future[float]] = []
    start = time.perf_counter()
    # When a step is done is seen from beside: some backends run it within the call
    # that dispatches it, others long after.
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
            f"`step_fn` returned a {type(result).__name__}: let it return (state, "
            "metrics)."
        )
    # The next step takes the state's own buffers: only metrics can be waited for.
    if not jax.tree.leaves(result[1]):
        raise ValueError(
            "`step_fn` returned no metrics: let it return (state, metrics) with one "
            "array at least, such as the loss, whose end can be waited for."
        )
    return result


def _end(metrics: Any) -> float:
    jax.block_until_ready(metrics)
    return time.perf_counter()
