"""Train steps of several micro-batches, of the same bucket or of different ones.

A step of G micro-batches would need an executable for every sequence of G buckets. It
is taken in phases instead: `add`, of which each bucket has an executable, adds up what
a micro-batch gives; `begin` and `update`, of which there is one, make zeros, and divide
once by the weight of all micro-batches. So the gradient is that of the mean over all
their tokens, and the optimizer, which clips it perhaps, sees nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import check_seed
from jaxbucket.compile import (
    CompiledSteps,
    CompileOptions,
    Program,
    check_is_batch,
    noting_arguments,
)
from jaxbucket.optim.precision import single_at_least
from jaxbucket.sharding import DATA_AXIS, Axes, axis_names
from jaxbucket.train.loss import LossFn, Metrics, Mode, over_batch, row_keys
from jaxbucket.train.pmap import PmapStep
from jaxbucket.train.step import (
    TrainState,
    check_state_sharding,
    gradient_sums,
    updater,
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["grads", "sums", "micro_batches"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Accumulated:
    """What the micro-batches of a step have given so far.

    Attributes:
      grads: sums of gradients, like the parameters, in float32 at least.
      sums: sums of the loss, its weight and all else that is counted.
      micro_batches: `[]` int32, how many were added.
    """

    grads: Any
    sums: Any
    micro_batches: Any


def data_parallel_accumulate(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    mode: Mode = "jit",
    batch_axes: Axes = DATA_AXIS,
    seed: int = 0,
    state_sharding: Any = None,
    skip_nonfinite: bool = False,
) -> AccumulatingStep:
    """Returns a train step over several micro-batches, `(state, micro_batches)`.

    As `data_parallel`, whose arguments, metrics and errors it has, with sums over all
    micro-batches in place of those over one: `BatchSchedule(..., accumulate=G)` gives
    such groups, `batch_dataset` and `prefetch_to_mesh` load them, and `compile_steps`
    compiles all phases. One extra trace of the loss finds out which sums it has.

    The state is donated with the last phase: where a micro-batch is refused, or its
    loss cannot be traced, it is what it was; what fails on the devices is known only
    later. Gradients in half precision are added in float32.
    """
    check_state_sharding(mode, state_sharding)
    sums_of = gradient_sums(loss_fn)
    over_devices = over_batch(sums_of, mesh, mode, batch_axes, check_seed(seed))
    update = updater(tx, skip_nonfinite)

    @noting_arguments
    def add_micro_batch(
        state: TrainState, accumulated: Accumulated, batch: Batch
    ) -> Accumulated:
        number = accumulated.micro_batches
        grads, sums = over_devices(state, batch, number)
        new = jax.tree.map(single_at_least, grads), sums
        grads, sums = jax.tree.map(jnp.add, (accumulated.grads, accumulated.sums), new)
        return Accumulated(grads, sums, number + 1)

    def update_state(
        state: TrainState, accumulated: Accumulated
    ) -> tuple[TrainState, Metrics]:
        return update(state, accumulated.grads, accumulated.sums)

    replicated = NamedSharding(mesh, PartitionSpec())
    of_state = replicated if state_sharding is None else state_sharding
    of_grads = of_state.params if isinstance(of_state, TrainState) else of_state
    of_sums = Accumulated(of_grads, replicated, replicated)
    if mode == "pmap":
        axes = axis_names(mesh, batch_axes)
        add = PmapStep(add_micro_batch, mesh, axes, donate=(1,), num_whole=2)
    else:
        add = jax.jit(add_micro_batch, donate_argnums=1, out_shardings=of_sums)
    return AccumulatingStep(
        add=add,
        # Gradients are not donated: nothing that comes out could take their place.
        update=jax.jit(
            update_state, donate_argnums=0, out_shardings=(of_state, replicated)
        ),
        sums_of=sums_of,
        shardings=of_sums,
    )


class AccumulatingStep:
    """`step(state, micro_batches) -> (state, metrics)`, jitted phase by phase.

    Attributes:
      add: `(state, accumulated, batch) -> accumulated`.
      update: `(state, accumulated) -> (state, metrics)`.
    """

    def __init__(
        self,
        add: Callable[[TrainState, Accumulated, Batch], Accumulated],
        update: Callable[[TrainState, Accumulated], tuple[TrainState, Metrics]],
        sums_of: Callable[..., Any],
        shardings: Accumulated,
    ):
        self.add = add
        self.update = update
        self._sums_of = sums_of
        self._shardings = shardings
        self._begins: dict[Any, Any] = {}

    def __call__(
        self, state: TrainState, micro_batches: Sequence[Batch]
    ) -> tuple[TrainState, Metrics]:
        """Takes a step.

        Raises:
          ValueError: if these are no micro-batches.
        """
        batches = _checked(micro_batches, self._shardings.sums)
        accumulated = self._begin_of(state, batches[0])()
        for batch in batches:
            accumulated = self.add(state, accumulated, batch)
        return self.update(state, accumulated)

    def compile_steps(
        self, state: Any, specs: Mapping[Bucket, Batch], options: CompileOptions
    ) -> CompiledAccumulation:
        """Compiles all phases ahead of time, as `jaxbucket.compile_steps` does."""
        zeros = self._zeros(state, next(iter(specs.values())))
        accumulated = self._spec(state, zeros)
        return CompiledAccumulation(
            self.add,
            (state, accumulated),
            specs,
            options,
            replicated=self._shardings.sums,
            phases=[
                Program("begin", self._new_begin(zeros), ()),
                Program("update", self.update, (state, accumulated)),
            ],
            # How pmap leaves its results on devices is known when there are some.
            ahead=not isinstance(self.add, PmapStep),
        )

    def _begin_of(self, state: Any, batch: Batch) -> Any:
        leaves, structure = jax.tree.flatten(state)
        key = (
            structure,
            *((leaf.shape, leaf.dtype) for leaf in leaves),
            # What sums a loss has may depend on the features that there are.
            *sorted(_dtypes(batch).items()),
        )
        if key not in self._begins:
            self._begins[key] = self._new_begin(self._zeros(state, batch))
        return self._begins[key]

    def _zeros(self, state: Any, batch: Batch) -> Any:
        """What is added up of a micro-batch, as shapes: the same for all of them."""

        def sums(state: TrainState, batch: Batch) -> Any:
            keys = row_keys(0, state.step, 0, batch.bucket.batch_size)
            grads, sums = self._sums_of(state, batch, keys)
            return jax.tree.map(single_at_least, grads), sums

        return jax.eval_shape(sums, state, batch)

    def _new_begin(self, zeros: Any) -> Any:
        def begin() -> Accumulated:
            grads, sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zeros)
            return Accumulated(grads, sums, jnp.zeros((), jnp.int32))

        return jax.jit(begin, out_shardings=self._shardings)

    def _spec(self, state: Any, zeros: Any) -> Accumulated:
        """The shapes of a step that has begun, where they will be."""
        grads, sums = zeros
        replicated = self._shardings.sums
        number = jax.ShapeDtypeStruct((), jnp.int32)
        sums, number = jax.tree.map(lambda x: _at(x, replicated), (sums, number))
        grads = jax.tree.map(lambda x, p: _at(x, p.sharding), grads, state.params)
        return Accumulated(grads, sums, number)


class CompiledAccumulation(CompiledSteps):
    """`steps(state, micro_batches)`; also a mapping from bucket to what adds up."""

    def __init__(
        self,
        add: Any,
        whole: tuple[Any, Accumulated],
        specs: Mapping[Bucket, Batch],
        options: CompileOptions,
        *,
        replicated: NamedSharding,
        phases: Sequence[Program],
        ahead: bool,
    ):
        super().__init__(add, whole, specs, options, phases if ahead else ())
        self._replicated = replicated
        self._jitted = {} if ahead else {x.label: x.fn for x in phases}

    def __call__(self, state: Any, batch: Sequence[Batch]) -> Any:  # pyright: ignore
        """Takes a step over all micro-batches.

        Raises:
          ValueError: if these are no micro-batches, or one has a shape, dtype or
            feature outside the plan.
        """
        batches = [self.fit(one) for one in _checked(batch, self._replicated)]
        accumulated = self._phase("begin")
        for one in batches:
            accumulated = self.run(state, accumulated, one)
        return self._phase("update", state, accumulated)

    def _phase(self, label: str, *args: Any) -> Any:
        if label in self._jitted:
            return self.waited_for(self._jitted[label](*args))
        return self.run_program(label, *args)


def _checked(micro_batches: Any, replicated: NamedSharding) -> Sequence[Batch]:
    """Says what is wrong with a group of micro-batches, before any of them is used."""
    # A batch is a tuple, too: of its arrays.
    is_group = isinstance(micro_batches, tuple | list) and not isinstance(
        micro_batches, Batch
    )
    if not (is_group and micro_batches):
        what = "empty" if is_group else f"a {type(micro_batches).__name__}"
        raise ValueError(
            f"`micro_batches` is {what}: "
            "give a tuple of `jaxbucket.Batch`, as a schedule with `accumulate` does."
        )
    for number, batch in enumerate(micro_batches):
        name = f"micro_batches[{number}]"
        check_is_batch(name, batch)
        if _dtypes(batch) != _dtypes(micro_batches[0]):
            raise ValueError(
                f"`{name}` has {_dtypes(batch)}, and the first one has "
                f"{_dtypes(micro_batches[0])}. Load all from the same source."
            )
        for leaf in jax.tree.leaves(batch):
            # Those of numpy are put where they belong.
            sharding = getattr(leaf, "sharding", replicated)
            if sharding.device_set != replicated.device_set:
                raise ValueError(
                    f"`{name}` is on {len(sharding.device_set)} devices that are "
                    f"not the {len(replicated.device_set)} of the step. Give "
                    "`prefetch_to_mesh` the mesh of the step."
                )
    return micro_batches


def _dtypes(batch: Any) -> dict[str, str]:
    """What each array of a batch is called -> its dtype."""
    leaves, _ = jax.tree.flatten_with_path(batch)
    return {jax.tree_util.keystr(path): str(leaf.dtype) for path, leaf in leaves}


def _at(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
