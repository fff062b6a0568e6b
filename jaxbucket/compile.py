"""One compiled executable per bucket, made before the first step."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax

from jaxbucket.base import Batch, Bucket
from jaxbucket.progress import progress_bar

_own_name: ContextVar[str | None] = ContextVar("own name", default=None)
# Enough to keep a device busy, however short a step is.
_MOST_IN_FLIGHT = 8
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def compile_steps(
    step_fn: Callable[[Any, Batch], Any],
    state: Any,
    specs: Mapping[Bucket, Batch],
    *,
    progress: bool = True,
) -> CompiledSteps:
    """Compiles a step for every bucket ahead of time.

    Args:
      step_fn: `(state, batch) -> anything`, jitted or not, or what
        `data_parallel_accumulate` returns. What it donates is its own
        choice: `jax.jit(step_fn, donate_argnums=0)`. A step that returns a new state
        must return it in the sharding it came in, as `data_parallel`'s does.
      state: the first state, or the shapes, dtypes and shardings of one.
      specs: a batch's shapes for every bucket, from `batch_specs`.
      progress: show a progress bar on a terminal.

    Returns:
      `steps(state, batch)`, which runs the executable of the batch's bucket.

    Raises:
      ValueError: if `specs` is empty.
    """
    if not specs:
        raise ValueError("`specs` is empty: pass what `batch_specs` returns.")
    if hasattr(step_fn, "compile_steps"):
        # A step of several phases knows them.
        return step_fn.compile_steps(state, specs, progress=progress)  # pyright: ignore
    if not hasattr(step_fn, "lower"):
        step_fn = jax.jit(step_fn)
    compiled, seconds = {}, {}
    # The largest first: what does not fit says so before the others are compiled.
    buckets = sorted(specs, key=lambda bucket: bucket.seq_len, reverse=True)
    with progress_bar(progress) as bar:
        for bucket in bar.track(buckets, description=f"Compiling {_name(step_fn)}"):
            start = time.perf_counter()
            compiled[bucket] = step_fn.lower(state, specs[bucket]).compile()  # pyright: ignore
            seconds[bucket] = time.perf_counter() - start
    return CompiledSteps(
        {bucket: compiled[bucket] for bucket in specs}, dict(specs), seconds
    )


def _name(step_fn: Callable) -> str:
    return getattr(step_fn, "__name__", "step")


class CompiledSteps(Mapping[Bucket, jax.stages.Compiled]):
    """`steps(state, batch)`; also a mapping from bucket to its executable.

    Attributes:
      seconds: bucket -> seconds it took to trace and compile.
    """

    def __init__(
        self,
        compiled: dict[Bucket, jax.stages.Compiled],
        specs: dict[Bucket, Batch],
        seconds: dict[Bucket, float],
    ):
        self._compiled = compiled
        self._specs = specs
        self._in_flight: collections.deque[jax.Array] = collections.deque()
        self.seconds = seconds

    def __getitem__(self, bucket: Bucket) -> jax.stages.Compiled:
        return self._compiled[bucket]

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._compiled)

    def __len__(self) -> int:
        return len(self._compiled)

    def __call__(self, state: Any, batch: Batch) -> Any:
        """Runs the executable of the batch's bucket.

        Raises:
          ValueError: if the batch has a shape, dtype or feature outside the plan.
        """
        self.check(batch)
        result = self._compiled[batch.bucket](state, batch)
        self.wait_for_an_earlier_step(result)
        return result

    def check(self, batch: Batch) -> None:
        """Raises a ValueError if a batch is not what was compiled for."""
        if not isinstance(batch, Batch):
            raise ValueError(
                f"`batch` is a {type(batch).__name__}, not a `jaxbucket.Batch`: pass "
                "what `prefetch_to_mesh` gives."
            )
        bucket = batch.bucket
        if bucket not in self._compiled:
            planned = ", ".join(map(str, self._compiled))
            raise ValueError(
                f"A batch of shape {bucket} is outside the plan, which has {planned}. "
                "Pass global batches of this plan, or compile for another one."
            )
        got, want = _avals(batch), _avals(self._specs[bucket])
        if got != want:
            raise ValueError(_difference(got, want, bucket))

    def wait_for_an_earlier_step(self, result: Any) -> None:
        """Keeps a loop that never looks at its metrics from running far ahead.

        Every step that waits holds its batch; and two processes of two CPU devices
        each have hung where nothing held them back (jax 0.10, one run in nine).
        """
        leaves = jax.tree.leaves(result)
        if leaves:
            # A state, which comes first, is soon donated; metrics are not.
            self._in_flight.append(leaves[-1])
        if len(self._in_flight) > _MOST_IN_FLIGHT:
            earlier = self._in_flight.popleft()
            if not earlier.is_deleted():
                earlier.block_until_ready()


def _avals(batch: Batch) -> dict[str, str]:
    """What each array of a batch is called -> its dtype and shape."""
    leaves, _ = jax.tree.flatten_with_path(batch)
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def _difference(got: dict[str, str], want: dict[str, str], bucket: Bucket) -> str:
    name = min(name for name in got | want if got.get(name) != want.get(name))
    remedy = "Convert the batch, or make `batch_specs` from an example like it."
    if name not in want:
        return f"`batch{name}` was not there when {bucket} was compiled. {remedy}"
    return (
        f"`batch{name}` is {got.get(name, 'missing')}, but {bucket} was compiled for "
        f"{want[name]}. {remedy}"
    )


@contextlib.contextmanager
def compiling_as(name: str) -> Iterator[None]:
    """Has `count_compiles` count by this name what jax calls by one of its own."""
    token = _own_name.set(name)
    try:
        yield
    finally:
        _own_name.reset(token)


@contextlib.contextmanager
def count_compiles() -> Iterator[collections.Counter[str]]:
    """Counts what XLA compiles inside a `with` block, by the function's name.

    Example:
      >>> import jax.numpy as jnp
      >>> def double(x):
      ...     return 2 * x
      >>> with count_compiles() as compiles:
      ...     for size in (3, 4, 3):
      ...         _ = jax.jit(double)(jnp.zeros(size))
      >>> compiles["double"]
      2

    It listens to jax's public monitoring events, so eager operations (`zeros` above)
    are counted too, under their own names.
    """
    compiles: collections.Counter[str] = collections.Counter()

    def listen(event: str, duration_secs: float, **details: Any) -> None:
        if event == _COMPILE_EVENT:
            name = _own_name.get() or str(details.get("fun_name", "?"))
            compiles[name.removeprefix("jit(").removesuffix(")")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiles
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
