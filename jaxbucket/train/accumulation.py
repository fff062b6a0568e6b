"""Train steps of several micro-batches, of the same bucket or of different buckets.

A single executable for a step of G micro-batches would have to be compiled for every
sequence of G buckets. The step therefore runs in phases. `begin` creates zeros, `add`
adds the gradients and sums of one micro-batch, and `update` divides by the weight of
all micro-batches and runs the optimizer. `add` is compiled once per bucket, the others
only once. The optimizer sees the gradient of the mean over all tokens of the step, so
that clipping, for example, is applied to that gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxbucket.base.batch import Batch, check_is_batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.notes import Noting
from jaxbucket.compile.build import CompileOptions, Program
from jaxbucket.compile.steps import CompiledSteps
from jaxbucket.optim.batch_size import at_least_float32
from jaxbucket.train.loss import Metrics
from jaxbucket.train.modes import Mode, jit_step, row_keys
from jaxbucket.train.state import TrainState, checked_state
from jaxbucket.train.variables import by_path, with_values


class Accumulated(NamedTuple):
    """Gradients and sums over the micro-batches of a step so far.

    Attributes:
      grads: gradient sums, in the structure of the parameters, in float32 or wider.
      sums: sums of the loss, its weight and everything else that is counted.
      variables: the variables that losses update, by path, after the micro-batches.
      micro_batches: `[]` int32, the number of micro-batches added.
    """

    grads: Any
    sums: Any
    variables: Any
    micro_batches: Any


class AccumulatingStep:
    """A step `(state, micro_batches) -> (state, metrics)` whose phases are jitted.

    Args:
      local_sums: `(state, batch, keys) -> ((gradients, sums), variables)` over the rows
        of `batch`.
      global_sums: the same over all rows, `(state, batch, micro_batch) -> ...`.
      update: `(state, gradients, sums, variables) -> (state, metrics)`.
      mesh: the mesh on which batches are sharded.
      mode: how the step runs on the devices.
      state_sharding: sharding of the state, or a tree of shardings.
      check: called with the state before it is used.

    Attributes:
      begin: `(state, batch) -> accumulated`, zeros of the shapes of their results.
      add: `(state, accumulated, batch) -> accumulated`.
      update: `(state, accumulated) -> (state, metrics)`.
    """

    def __init__(
        self,
        local_sums: Callable[..., Any],
        global_sums: Callable[..., Any],
        update: Callable[..., tuple[TrainState, Metrics]],
        mesh: Mesh,
        mode: Mode,
        state_sharding: Any,
        check: Callable[[Any], None] | None,
    ):
        self._check = check or (lambda state: None)

        def add_micro_batch(
            state: TrainState, accumulated: Accumulated, batch: Batch
        ) -> Accumulated:
            number = accumulated.micro_batches
            state = _with_variables_of(accumulated, state)
            (grads, sums), variables = global_sums(state, batch, number)
            new = jax.tree.map(at_least_float32, grads), sums
            with Noting("`loss_fn` must return the same sums for all micro-batches."):
                both = (accumulated.grads, accumulated.sums)
                grads, sums = jax.tree.map(jnp.add, both, new)
            return Accumulated(grads, sums, variables, number + 1)

        def begin(state: TrainState, batch: Batch) -> Accumulated:
            def results(state: TrainState, batch: Batch) -> Any:
                keys = row_keys(0, checked_state(state).step, batch.bucket.batch_size)
                (grads, sums), variables = local_sums(state, batch, keys)
                return jax.tree.map(at_least_float32, grads), sums, variables

            shapes = jax.eval_shape(results, state, batch)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            grads, sums, variables = zeros
            return Accumulated(grads, sums, variables, jnp.zeros((), jnp.int32))

        def update_state(
            state: TrainState, accumulated: Accumulated
        ) -> tuple[TrainState, Metrics]:
            grads, sums = accumulated.grads, accumulated.sums
            return update(state, grads, sums, accumulated.variables)

        replicated = NamedSharding(mesh, PartitionSpec())
        of_grads = state_sharding
        if isinstance(state_sharding, TrainState):
            of_grads = state_sharding.params
        shardings = Accumulated(of_grads, replicated, replicated, replicated)
        self._begin, self._shardings = begin, shardings
        self.begin = jax.jit(begin, out_shardings=shardings)
        self.add = jit_step(
            add_micro_batch, mesh, mode, donate=(1,), out_shardings=shardings
        )
        # Gradients are not donated, because no output could reuse their buffers.
        self.update = jax.jit(
            update_state, donate_argnums=0, out_shardings=(state_sharding, replicated)
        )

    def __call__(
        self, state: TrainState, micro_batches: Sequence[Batch]
    ) -> tuple[TrainState, Metrics]:
        """Takes a step over all micro-batches; the last phase donates the state."""
        batches = _checked(micro_batches)
        self._check(state)
        accumulated = self.begin(state, batches[0])
        for batch in batches:
            accumulated = self.add(state, accumulated, batch)
        return self.update(state, accumulated)

    def compile_steps(
        self, state: Any, specs: Mapping[Bucket, Batch], options: CompileOptions
    ) -> CompiledAccumulation:
        """Compiles all phases ahead of time, with arguments of `compile_steps`."""
        self._check(state)
        # A function without arguments serves all buckets.
        first = next(iter(specs.values()))

        def begin() -> Accumulated:
            return self._begin(state, first)

        accumulated = self._specs(jax.eval_shape(begin), state)
        return CompiledAccumulation(
            self.add,
            (state, accumulated),
            specs,
            options,
            [
                Program("begin", jax.jit(begin, out_shardings=self._shardings), ()),
                Program("update", self.update, (state, accumulated)),
            ],
        )

    def _specs(self, shapes: Accumulated, state: Any) -> Accumulated:
        """Returns shapes, dtypes and shardings of the result of `begin`."""

        def at(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        replicated = jax.tree.map(lambda x: at(x, self._shardings.sums), shapes)
        grads = jax.tree.map(lambda x, p: at(x, p.sharding), shapes.grads, state.params)
        return replicated._replace(grads=grads)


class CompiledAccumulation(CompiledSteps):
    """Compiled `steps(state, micro_batches)`, and a mapping from bucket to `add`."""

    def __call__(self, state: Any, batch: Sequence[Batch]) -> Any:  # pyright: ignore
        """Takes a step as `AccumulatingStep`, but only over batches of the plan."""
        micro_batches = _checked(batch)
        buckets = list(map(self.bucket_of, micro_batches))
        accumulated = self.run_program("begin")
        for bucket, micro_batch in zip(buckets, micro_batches, strict=True):
            accumulated = self.run_program(bucket, state, accumulated, micro_batch)
        return self.run_program("update", state, accumulated)


def _with_variables_of(accumulated: Accumulated, state: TrainState) -> TrainState:
    """Returns the state with the variables after the micro-batches so far."""
    is_first = accumulated.micro_batches == 0
    state_values = by_path(state.variables)
    values = {
        path: jnp.where(is_first, state_values[path], value)
        for path, value in accumulated.variables.items()
    }
    variables = with_values(state.variables, values)
    return dataclasses.replace(state, variables=variables)


def _checked(micro_batches: Any) -> Sequence[Batch]:
    """Returns the micro-batches if they are valid, before any of them is used."""
    # A `Batch` is a tuple, too.
    if isinstance(micro_batches, Batch) or not micro_batches:
        raise ValueError(
            f"`micro_batches` is a {type(micro_batches).__name__}. Pass a tuple of at "
            "least one `jaxbucket.Batch`, as yielded by a schedule with `accumulate`, "
            "or make a step without `accumulate`, as `calibrate` needs."
        )
    for number, batch in enumerate(micro_batches):
        check_is_batch(f"micro_batches[{number}]", batch)
    return micro_batches
