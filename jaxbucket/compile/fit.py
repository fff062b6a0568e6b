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
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_float, check_positive
from jaxbucket.base.progress import progress_bar
from jaxbucket.base.table import bytes_text
from jaxbucket.compile.absent import default_devices, memory_limit
from jaxbucket.compile.build import CompileOptions
from jaxbucket.compile.recipes import call_recipe
from jaxbucket.compile.report import shard_bytes
from jaxbucket.compile.steps import compile_with, is_out_of_memory
from jaxbucket.plan.memory_fit import FittedBatchSize, FittedBatchSizes

# Tokens on each device of the first program for TPUs, which should be refused.
_MANY_TOKENS = 2**24
# How far a search goes beyond what it knows.
_GROWTH = 16
# XLA for TPUs prints three or four digits.
_ROUNDING = 1.001
# More positions of a batch on each device than anybody needs.
_MOST_TOKENS = 2**31
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
# How XLA for TPUs refuses a program: before it tries to save memory, and after.
_REFUSALS = (
    re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)


@dataclasses.dataclass(frozen=True)
class _Result:
    """What is known of one program.

    Attributes:
      fits: whether it was compiled, within the limit.
      num_bytes: what it needs on each device; None if unknown.
      available: the memory of which the compiler says that the program exceeds it.
      error: with which the compiler refused it.
    """

    fits: bool
    num_bytes: int | None
    available: int | None = None
    error: Exception | None = None


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
      >>> import jax, numpy as np
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
      <FittedBatchSizes: [776, 16], [192, 64]>

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
      The batch sizes, which are a `max_tokens` for `plan_buckets`.

    Raises:
      ValueError: if the limit is unknown, an argument is out of range, or nothing fits.
      Exception: any error of the recipe, or of a program that is not refused for lack
        of memory.
    """
    devices = default_devices()
    limit = _limit_bytes(memory_bytes, margin, devices[0])
    multiples = len(devices) if batch_size_multiple is None else batch_size_multiple
    if isinstance(seq_lens, int) or not len(seq_lens):
        raise ValueError(f"`seq_lens={seq_lens!r}`: pass one T or more, in a list.")
    searches: dict[int, _Search] = {}
    for seq_len in sorted({check_positive("seq_lens", x) for x in seq_lens}):
        multiple = multiples(seq_len) if callable(multiples) else multiples
        check_positive("batch_size_multiple", multiple)
        many = math.ceil(_MANY_TOKENS * len(devices) / (seq_len * multiple))
        searches[seq_len] = _Search(multiple, limit, many if limit is None else 1)
    options = CompileOptions(workers, progress=False, keep_going=True)
    state_bytes = 0
    with progress_bar(progress) as bar:
        task = bar.add_task("Fitting", total=None)
        while not all(search.ends for search in searches.values()):
            plan = BucketPlan.from_shapes(
                [(x.next_batch_size, t) for t, x in searches.items() if not x.ends]
            )
            _check_is_reached(plan, len(devices))
            # Called again for each round, so that only one state is in memory.
            steps = call_recipe(recipe, plan, arguments)
            state_bytes = max(shard_bytes(state) for _, state, _ in steps.values())
            for bucket, result in _compile(steps, plan, options, limit).items():
                searches[bucket.seq_len].add(bucket.batch_size, result, state_bytes)
                bar.advance(task)
    sizes = [search.fitted(seq_len) for seq_len, search in searches.items()]
    if not any(size.batch_size for size in sizes):
        size = sizes[0]
        limited = "what the compiler accepts" if limit is None else bytes_text(limit)
        needed = "more" if size.next_bytes is None else bytes_text(size.next_bytes)
        raise ValueError(
            f"No batch fits in {limited}: even [{size.next_batch_size}, "
            f"{size.seq_len}] needs {needed} on each device, {bytes_text(state_bytes)} "
            "of it for the state. Use more memory, shorter `seq_lens`, a smaller "
            "`batch_size_multiple` or model, or shard the state "
            "(`jb.sharding.fully_sharded`)."
        ) from searches[size.seq_len].error
    return FittedBatchSizes(tuple(sizes), limit)


def _limit_bytes(memory_bytes: float | None, margin: float, device: Any) -> int | None:
    """Returns the bytes that programs may use, or None for what XLA accepts."""
    margin = check_float("margin", margin, least=0.0, most=0.99)
    if memory_bytes is not None:
        memory_bytes = check_float("memory_bytes", memory_bytes)
    elif device.platform == "tpu" and not margin:
        return None
    else:
        memory_bytes = memory_limit(device)
    if memory_bytes is None:
        raise ValueError(
            f"The memory of a {device.device_kind} is unknown. Pass `memory_bytes` "
            "(`--memory-gb`)."
        )
    return int(memory_bytes * (1 - margin))


def _check_is_reached(plan: BucketPlan, num_devices: int) -> None:
    """Raises a ValueError if batches become absurd before memory ends."""
    for bucket in plan.buckets:
        if bucket.num_tokens > _MOST_TOKENS * num_devices:
            raise ValueError(
                f"Even {bucket} does not need the memory that `memory_bytes` allows. "
                "Pass a smaller one, or check that the step uses its batch."
            )


def _compile(
    steps: Mapping[str, tuple[Any, Any, Any]],
    plan: BucketPlan,
    options: CompileOptions,
    limit: int | None,
) -> dict[Bucket, _Result]:
    """Compiles all programs of a plan; returns what is known of each bucket."""
    results: dict[Bucket, _Result] = {}
    for step_fn, state, specs in steps.values():
        # Where one program does not fit, the others need not be compiled.
        open_buckets = [b for b in plan.buckets if b not in results or results[b].fits]
        specs = {bucket: specs[bucket] for bucket in open_buckets if bucket in specs}
        if not specs:
            continue
        compiled = compile_with(options, step_fn, state, specs)
        found: dict[str, _Result] = {}
        for program in compiled.report.programs:
            size = program.peak_bytes
            # Memory that is unknown is above any limit.
            fits = limit is None or (size is not None and size <= limit)
            found[program.label] = _Result(fits, size)
        for label, error in compiled.failures.items():
            if not is_out_of_memory(error):
                raise error
            sizes = refused_bytes(error) or (None, None)
            found[label] = _Result(False, *sizes, error=error)
        of_buckets = {bucket: found.pop(str(bucket)) for bucket in specs}
        for bucket, result in of_buckets.items():
            # What is left are phases, such as the update after micro-batches, which are
            # part of every step.
            results[bucket] = max(
                [results.get(bucket, result), result, *found.values()],
                key=lambda result: (not result.fits, result.num_bytes or 0),
            )
    return results


def refused_bytes(error: BaseException) -> tuple[int, int] | None:
    """Returns the bytes that a program needs, and those that there are.

    Returns None if the compiler does not say.

    Example:
      >>> refused_bytes(ValueError("Used 20.50G of 15.75G hbm. Exceeded by 4.75G"))
      (22011707392, 16911433728)
    """
    for refusal in _REFUSALS:
        if match := refusal.search(str(error)):
            needed, unit, available, unit_available = match.groups()
            return (
                int(float(needed) * _UNITS[unit]),
                int(float(available) * _UNITS[unit_available]),
            )
    return None


class _Search:
    """The search for the largest B of one T, counted in multiples.

    It is a secant search between the largest count that is known to fit and the
    smallest that is known not to, and halves this interval if that does not.

    Args:
      multiple: B is a multiple of this number.
      limit: the bytes that programs may use; None for what the compiler accepts.
      first: the first count to try.

    Attributes:
      error: the error with which the smallest batch that does not fit was refused.
    """

    def __init__(self, multiple: int, limit: int | None, first: int):
        self.multiple = multiple
        self.error: Exception | None = None
        # Programs that are refused are cheap, so that the search avoids others.
        self._is_from_above = limit is None
        self._limit = limit
        self._first = first
        # Count -> what is known; without rows, a program needs at least the state.
        self._results: dict[int, _Result] = {}
        # The largest count that fits, and the smallest that does not.
        self._low, self._high = 0, math.inf
        # Rounds since the interval was halved last, and the width that it then had.
        self._stalled, self._width = 0, math.inf

    def add(self, batch_size: int, result: _Result, state_bytes: int) -> None:
        """Adds what is known of a program, and of its state."""
        count = batch_size // self.multiple
        self._results |= {0: _Result(True, state_bytes), count: result}
        if result.fits:
            self._low = max(self._low, count)
        elif count < self._high:
            self._high, self.error = count, result.error
            self._limit = self._limit or result.available
        self._stalled += 1
        if self._high - self._low <= self._width / 2:
            self._stalled, self._width = 0, self._high - self._low

    @property
    def ends(self) -> bool:
        """Whether the answer is known."""
        return self._high - self._low == 1

    @property
    def next_batch_size(self) -> int:
        """The B to compile next."""
        low, high = self._low, self._high
        if not self._results:
            count = self._first
        elif high < math.inf:
            count = self._above() if self._is_from_above else self._between()
        else:
            one, other = sorted(self._results)[-2:]
            # If the prediction is right, this does not fit, and the one before does.
            count = self._crossing(one, other, math.inf) + 1
            # A prediction that was too low, again and again, is not to be trusted.
            least = low + (low >> max(0, 7 - len(self._results)))
            count = min(max(count, least), _GROWTH * low)
        return int(min(max(count, low + 1), high - 1)) * self.multiple

    def _between(self) -> float:
        """Returns a count between one that fits and one that does not."""
        middle = (self._low + self._high) // 2
        # The secant may leave one of the ends where it is.
        if self._stalled > 1:
            return middle
        predicted = self._crossing(self._low, self._high, middle)
        # It and the next one are both to be compiled: first what leaves less between.
        return predicted + (predicted < middle)

    def _above(self) -> float:
        """Returns a count that should not fit, closer to the limit."""
        low, high = self._low, self._high
        # Digits that the compiler leaves out make programs near the limit look alike.
        least = (self._limit or 0) * _ROUNDING
        refused = [
            count
            for count, result in sorted(self._results.items())
            if not result.fits and (result.num_bytes or 0) > least
        ]
        if not refused or (low and self._stalled > 3):
            return (low + high) // 2
        one, other = [0, *refused[:2]][-2:]
        # Close to the limit, programs need less than those far above it predict.
        target = max(self._crossing(one, other, 0), low)
        if high > 4 * target:
            return max(2 * target, 1)
        # Longer and longer steps, if the prediction stays ahead of all programs.
        return min((high + target) // 2, high - (1 << self._stalled) // 4)

    def _crossing(self, one: float, other: float, default: float) -> float:
        """Returns the largest count that should fit, by the bytes of two counts."""
        size, next_size = self._bytes(one), self._bytes(other)
        if None in (size, next_size, self._limit) or next_size <= size:
            return default
        slope = (next_size - size) / (other - one)
        return max(0, math.floor(one + (self._limit - size) / slope))

    def _bytes(self, count: float) -> Any:
        return self._results[int(count)].num_bytes

    def fitted(self, seq_len: int) -> FittedBatchSize:
        """Returns the answer."""
        programs = [result for count, result in self._results.items() if count]
        num_refused = sum(result.error is not None for result in programs)
        return FittedBatchSize(
            seq_len,
            self._low * self.multiple,
            self._low and (self._bytes(self._low) or 0),
            int(self._high) * self.multiple,
            self._bytes(self._high),
            len(programs) - num_refused,
            num_refused,
        )
