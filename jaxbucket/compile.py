"""One compiled executable per bucket, made before the first step."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxbucket.base import Batch, Bucket

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
      step_fn: `(state, batch) -> anything`, jitted or not. What it donates is its own
        choice: `jax.jit(step_fn, donate_argnums=0)`. A step that returns a new state
        must return it in the sharding it came in, as `data_parallel`'s does.
      state: the first state, or the shapes, dtypes and shardings of one.
      specs: a batch's shapes for every bucket, from `batch_specs`.
      progress: show a progress bar on a terminal.

    Returns:
      `steps(state, batch)`, which runs the executable of the batch's bucket.
    """
    from rich.progress import track

    if not hasattr(step_fn, "lower"):
        step_fn = jax.jit(step_fn)
    compiled, seconds = {}, {}
    # The largest first: what does not fit says so before the others are compiled.
    buckets = sorted(specs, key=lambda bucket: bucket.seq_len, reverse=True)
    for bucket in track(
        buckets, f"Compiling {_name(step_fn)}", disable=not progress, transient=True
    ):
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
        bucket = batch.bucket
        if bucket not in self._compiled:
            planned = ", ".join(map(str, self._compiled))
            raise ValueError(
                f"A batch of shape {bucket} is outside the plan, which has {planned}. "
                "Pass global batches of this plan, or compile for another one."
            )
        if jax.tree.map(_aval, batch) != jax.tree.map(_aval, self._specs[bucket]):
            raise ValueError(_difference(batch, self._specs[bucket]))
        return self._compiled[bucket](state, batch)


def _aval(leaf: Any) -> tuple[tuple[int, ...], str]:
    return leaf.shape, str(leaf.dtype)


def _difference(batch: Batch, spec: Batch) -> str:
    got = {name: _aval(leaf) for name, leaf in batch.as_dict().items()}
    want = {name: _aval(leaf) for name, leaf in spec.as_dict().items()}
    for name in sorted(got.keys() | want.keys()):
        if got.get(name) != want.get(name):
            return (
                f"The batch's {name!r} is {_shown(got.get(name))}, but bucket "
                f"{spec.bucket} was compiled for {_shown(want.get(name))}. Convert the "
                "batch, or make `batch_specs` from an example like it."
            )
    raise AssertionError("called without a difference")


def _shown(aval: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if aval is None else f"{aval[1]}{list(aval[0])}"


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
            name = str(details.get("fun_name", "?"))
            compiles[name.removeprefix("jit(").removesuffix(")")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiles
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
