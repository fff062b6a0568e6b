"""Finds the largest batch size that fits into memory, by compiling and not running.

The memory of a program is almost affine in B. So two programs predict the largest B
that fits, and the answer is checked: `[B, T]` was compiled and fits, and the program of
the next B was compiled and does not. XLA for TPUs refuses such a program, which takes
it much less time than to compile one that fits. So for TPUs the search comes from
above.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_float, check_positive
from jaxbucket.base.progress import progress_bar
from jaxbucket.compile.absent import default_devices, memory_limit
from jaxbucket.compile.build import CompileOptions
from jaxbucket.compile.memory import is_out_of_memory, refused_bytes
from jaxbucket.compile.recipes import call_recipe
from jaxbucket.compile.steps import compile_with
from jaxbucket.plan.fitted import FittedBatchSize, FittedBatchSizes

# Tokens on each device of the first program for TPUs, which should be refused.
_MANY_TOKENS = 2**24
# How far a search goes beyond what it knows.
_GROWTH = 16


@dataclasses.dataclass(frozen=True)
class _Result:
    """What is known of one program.

    Attributes:
      fits: whether it was compiled, within the limit.
      num_bytes: what it needs on each device; None if unknown.
      argument_bytes: the part of its arguments, mostly of the state.
      available: the memory of which the compiler says that the program exceeds it.
    """

    fits: bool
    num_bytes: int | None
    argument_bytes: int = 0
    available: int | None = None
    is_refused: bool = False


def fit_batch_sizes(
    recipe: Callable[..., Any],
    seq_lens: Sequence[int],
    *arguments: str,
    batch_size_multiple: int | Callable[[int], int] | None = None,
    memory_bytes: float | None = None,
    margin: float = 0.0,
    workers: int | None = None,
    progress: bool = True,
) -> FittedBatchSizes:
    """Returns the largest B of each T whose programs fit into memory.

    Programs are compiled and not run, on the devices of this machine or on those of
    `absent_devices`. On TPUs, what XLA refuses does not fit. Elsewhere, arguments,
    outputs that are not donated and temporary buffers are compared with the limit.

    Example: the largest batches of 16 and of 64 tokens in 200 kB.
      >>> import numpy as np
      >>> import jaxbucket as jb
      >>> def recipe(plan):
      ...     mesh = jb.data_mesh(jax.devices()[:1])
      ...     state = jb.sharding.replicate(jax.ShapeDtypeStruct((), np.float32), mesh)
      ...     specs = jb.sharding.batch_specs(plan, {"x": np.ones(3, "f4")}, mesh)
      ...     return (lambda state, batch: state * batch.features["x"]), state, specs
      >>> fit_batch_sizes(
      ...     recipe, [16, 64], batch_size_multiple=8, memory_bytes=200_000,
      ...     progress=False,
      ... )
      <FittedBatchSizes: [1560, 16], [384, 64]>

    Args:
      recipe: called with a plan and the arguments; returns `(step_fn, state, specs)`,
        or a dict of such triples by name, as for `jaxbucket precompile`. All programs
        of a bucket must fit. It is called a few times.
      seq_lens: the T.
      *arguments: passed on to the recipe.
      batch_size_multiple: every B is a multiple of this number, or of that which a
        function returns for T; by default the number of devices.
      memory_bytes: the memory of each device. By default the memory that jax may use on
        GPUs, and whatever XLA accepts on TPUs.
      margin: the part of the memory to leave free, such as 0.08, for what is not part
        of a program: batches that wait, other programs, fragmentation.
      workers: the number of programs to compile at the same time; defaults to half the
        number of CPU cores.
      progress: whether to show a progress bar on a terminal.

    Returns:
      The batch sizes, whose `max_tokens` is a budget for `plan_buckets`.

    Raises:
      ValueError: if the limit is unknown, an argument is out of range, or nothing fits.
      Exception: any error of the recipe, or of a program that is not refused for lack
        of memory.
    """
    devices = default_devices()
    limit = _checked_limit(memory_bytes, margin, devices[0])
    is_tpu = devices[0].platform == "tpu"
    multiples = len(devices) if batch_size_multiple is None else batch_size_multiple
    if not len(seq_lens):
        raise ValueError("`seq_lens` is empty. Pass the T to fit.")
    searches: dict[int, _Search] = {}
    for seq_len in sorted({check_positive("seq_lens", x) for x in seq_lens}):
        multiple = multiples(seq_len) if callable(multiples) else multiples
        check_positive("batch_size_multiple", multiple)
        many = math.ceil(_MANY_TOKENS * len(devices) / (seq_len * multiple))
        searches[seq_len] = _Search(multiple, limit, is_tpu, many if is_tpu else 1)
    options = CompileOptions(workers, progress=False, keep_going=True)
    steps: Mapping[str, Any] = {}
    with progress_bar(progress) as bar:
        task = bar.add_task("Fitting", total=None)
        while True:
            shapes = [(x.next_batch_size, t) for t, x in searches.items() if not x.ends]
            if not shapes:
                break
            plan = BucketPlan.from_shapes(shapes)
            # Called again for each round, so that only one state is in memory.
            steps = call_recipe(recipe, plan, arguments)
            results = _compile(steps, plan, options, limit)
            for bucket, result in results.items():
                searches[bucket.seq_len].add(bucket.batch_size, result)
                bar.advance(task)
    sizes = [search.fitted(seq_len) for seq_len, search in searches.items()]
    if not any(size.batch_size for size in sizes):
        raise _nothing_fits(sizes[0], steps, limit)
    return FittedBatchSizes(tuple(sizes), limit)


def _checked_limit(
    memory_bytes: float | None, margin: float, device: Any
) -> int | None:
    """Returns the bytes that programs may use, or None for what XLA accepts."""
    margin = check_float("margin", margin, least=0.0, most=0.99)
    if memory_bytes is None:
        memory_bytes = memory_limit(device)
    else:
        memory_bytes = check_float("memory_bytes", memory_bytes)
    is_tpu = device.platform == "tpu"
    if memory_bytes is None and (margin or not is_tpu):
        raise ValueError(
            f"The memory of a {device.device_kind} is unknown. Pass `memory_bytes` "
            "(`--memory-gb`)."
        )
    return None if memory_bytes is None else int(memory_bytes * (1 - margin))


def _compile(
    steps: Mapping[str, tuple[Any, Any, Any]],
    plan: BucketPlan,
    options: CompileOptions,
    limit: int | None,
) -> dict[Bucket, _Result]:
    """Compiles all programs of a plan; returns what is known of each bucket."""
    results: dict[Bucket, _Result] = {}
    for step_fn, state, specs in steps.values():
        specs = {bucket: specs[bucket] for bucket in plan.buckets if bucket in specs}
        if not specs:
            continue
        compiled = compile_with(options, step_fn, state, specs)
        reports = {p.label: p for p in compiled.report.programs}
        for label, error in compiled.failures.items():
            if not is_out_of_memory(error) or label not in specs:
                raise error
        for bucket in specs:
            error = compiled.failures.get(bucket)
            if error is not None:
                needed, available = refused_bytes(error) or (None, None)
                result = _Result(False, needed, available=available, is_refused=True)
            else:
                report = reports[str(bucket)]
                peak = report.peak_bytes
                # Memory that is unknown is above any limit.
                fits = limit is None or (math.inf if peak is None else peak) <= limit
                result = _Result(fits, peak, report.argument_bytes or 0)
            results[bucket] = _larger(results.get(bucket), result)
    return results


def _larger(one: _Result | None, other: _Result) -> _Result:
    """Returns the result of the two that leaves less memory."""
    if one is None or one.fits != other.fits:
        return other if one is None or one.fits else one
    return max(one, other, key=lambda result: result.num_bytes or 0)


class _Search:
    """The search for the largest B of one T, counted in multiples.

    Args:
      multiple: B is a multiple of this number.
      limit: the bytes that programs may use; None for what the compiler accepts.
      is_from_above: whether programs that do not fit are cheap, so that the search
        avoids others.
      first: the first count to try.
    """

    def __init__(
        self, multiple: int, limit: int | None, is_from_above: bool, first: int
    ):
        self._multiple = multiple
        self._limit = limit
        self._is_from_above = is_from_above
        self._first = first
        self._results: dict[int, _Result] = {}
        # The largest count that fits, and the smallest that does not.
        self._low, self._high = 0, math.inf

    def add(self, batch_size: int, result: _Result) -> None:
        """Adds what is known of a program."""
        count = batch_size // self._multiple
        self._results[count] = result
        if result.fits:
            self._low = max(self._low, count)
        else:
            self._high = min(self._high, count)
            self._limit = self._limit or result.available

    @property
    def ends(self) -> bool:
        """Whether the answer is known."""
        return self._high - self._low == 1

    @property
    def next_batch_size(self) -> int:
        """The B to compile next."""
        return self._next_count() * self._multiple

    def _next_count(self) -> int:
        if not self._results:
            return self._first
        low, high = self._low, self._high
        predicted, is_rough = self._predicted()
        if self._is_from_above and high < math.inf:
            # Close to the limit, programs need less than those far above it predict.
            target = max(predicted, low)
            is_far = high > 4 * target
            following = 2 * target if is_far else (high + target) // 2
            following = max(following, target + 1)
        else:
            # If the prediction is right, this does not fit, and the one before does.
            following = predicted + (not is_rough)
        most = high - 1 if high < math.inf else _GROWTH * max(low, 1)
        return int(min(max(following, low + 1), most))

    def _predicted(self) -> tuple[int, bool]:
        """Returns the predicted answer, and whether it comes from a single program."""
        points = [
            (count, result.num_bytes)
            for count, result in self._results.items()
            # What TPUs' compiler accepts was changed to fit.
            if result.num_bytes and not (self._is_from_above and result.fits)
        ]
        if self._limit is None or not points:
            return _GROWTH * self._low, True
        limit = self._limit
        points.sort(key=lambda point: abs(point[1] - limit))
        (count, needed), *others = points
        base = self._results[count].argument_bytes
        other_count, other = others[0] if others else (0, base)
        slope = (needed - other) / (count - other_count)
        if slope <= 0:
            # Rounded to the same value, or another choice of the compiler.
            slope = (needed - base) / count
        return max(0, math.floor(count + (limit - needed) / slope)), not others

    def fitted(self, seq_len: int) -> FittedBatchSize:
        """Returns the answer."""
        low, high = self._low, int(self._high)
        results = self._results.values()
        num_refused = sum(result.is_refused for result in results)
        return FittedBatchSize(
            seq_len,
            low * self._multiple,
            (self._results[low].num_bytes or 0) if low else 0,
            high * self._multiple,
            self._results[high].num_bytes,
            len(results) - num_refused,
            num_refused,
        )


def _nothing_fits(
    size: FittedBatchSize, steps: Mapping[str, Any], limit: int | None
) -> ValueError:
    state = max(map(_state_bytes, (state for _, state, _ in steps.values())))
    limited = "what the compiler accepts" if limit is None else f"{limit / 1e9:.4g} GB"
    needed = "more" if size.next_bytes is None else f"{size.next_bytes / 1e9:.4g} GB"
    return ValueError(
        f"No batch fits in {limited}: even [{size.next_batch_size}, {size.seq_len}] "
        f"needs {needed} on each device, {state / 1e9:.4g} GB of it for the state. Use "
        "more memory, shorter `seq_lens`, a smaller `batch_size_multiple` or model, or "
        "shard the state (`jb.sharding.fully_sharded`)."
    )


def _state_bytes(state: Any) -> int:
    """Returns the size of a state on each device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
        if hasattr(leaf, "sharding")
    )
