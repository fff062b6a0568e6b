"""Measures how the gradients of buckets differ from the gradient of the data.

A batch of one bucket has examples of similar lengths, so its gradient is that of these
lengths. The order of the steps makes up for this over time, but every single update
is further away from the mean gradient than an update from examples of all lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from bias_report import BucketBias
from gradient_estimates import MIN_BATCHES, GradientSamples
from gradient_sketch import make_sketch
from jax.sharding import NamedSharding, PartitionSpec

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import check_function, check_integer, check_seed
from jaxbucket.base.progress import progress_bar
from jaxbucket.compile.steps import compile_steps
from jaxbucket.sharding.global_batch import prefetch_to_mesh
from jaxbucket.train.gradients import gradient_sums
from jaxbucket.train.loss import LossFn, Metrics
from jaxbucket.train.modes import sum_over_batch
from jaxbucket.train.state import TrainState, checked_state

if TYPE_CHECKING:
    from jaxbucket.train.loader import MeshLoader


def bucket_bias(
    loss_fn: LossFn,
    state: TrainState,
    batches: MeshLoader,
    *,
    batches_per_bucket: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> BucketBias:
    """Measures the bias and the noise of the gradients of every bucket.

    The state is not changed. Gradients change during training, so measure them after a
    few hundred steps rather than at the first step, and on batches that are still to
    come: `MeshLoader(..., start_step=int(state.step))`. The measurement takes about as
    long as `batches_per_bucket` training steps of every bucket. It compiles one program
    for each bucket, and a small one for each shape of a parameter. All processes of the
    mesh must call this function. The loss may change any variables of the model, such
    as batch statistics; the new values are not used.

    Example:
      >>> import jax, optax, jaxbucket as jb
      >>> rng = np.random.default_rng(0)
      >>> source = [{"x": np.full(n, n, np.float32)} for n in rng.integers(1, 9, 400)]
      >>> lengths = jb.measure_lengths(source, progress=False)
      >>> plan = jb.plan_buckets(lengths, max_tokens=16, num_buckets=2)
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> batches = jb.MeshLoader(source, jb.BatchSchedule(plan, lengths), mesh)
      >>> def loss_fn(params, batch, keys):
      ...     losses = (params["w"] - batch.features["x"]) ** 2
      ...     return losses.sum(where=batch.mask), batch.num_tokens
      >>> state = jb.create_state({"w": np.float32(8)}, optax.sgd(0.1), mesh)
      >>> bias = bucket_bias(loss_fn, state, batches)
      >>> [x.bucket.seq_len for x in bias.buckets]
      [4, 8]
      >>> shuffled, spread, *_ = bias.ways
      >>> spread.more_tokens < shuffled.more_tokens
      True

    Args:
      loss_fn: the loss, as for `make_train_step`.
      state: the state whose parameters the gradients are taken at.
      batches: the loader of the run. Batches are chosen at random from the first whole
        epoch after its `start_step`. Its schedule may be for padded or packed rows, and
        micro-batches are measured one by one. Components of a mixture are measured
        together, bucket by bucket.
      batches_per_bucket: the number of batches to measure in each bucket, at least 3.
      seed: the seed of the choice and of the keys that the loss receives.
      progress: whether to show progress bars on a terminal.

    Returns:
      The bias and the noise of each bucket, and what other orders would change.

    Raises:
      ValueError: if `loss_fn` is not a function, `state` is not a state of
        `create_state`, or `batches` not a `MeshLoader`; if `batches_per_bucket` is
        below 3; if no bucket has three batches; if a gradient is not finite, or their
        mean cannot be told from zero; or if the loss breaks its contract.
    """
    check_function("loss_fn", loss_fn, "(model, batch, keys)")
    checked_state(state)
    check_seed(seed)
    if check_integer("batches_per_bucket", batches_per_bucket) < MIN_BATCHES:
        raise ValueError(
            f"`batches_per_bucket={batches_per_bucket}` is too small to estimate "
            f"noise and its error. Measure at least {MIN_BATCHES} batches of every "
            "bucket."
        )
    if not hasattr(batches, "schedule") or not hasattr(batches, "mesh"):
        raise ValueError(
            f"`batches` is a {type(batches).__name__}. Pass the loader itself, "
            "`MeshLoader(source, schedule, mesh)`, whose schedule tells how often each "
            "bucket occurs."
        )
    counts, chosen = _choose(batches, batches_per_bucket, seed)
    step_fn = _make_gradient_step(loss_fn, state, batches, seed)
    sketch = make_sketch(batches.mesh, seed)
    specs = {key: spec for key, spec in batches.specs.items() if spec.bucket in counts}
    steps = compile_steps(step_fn, state, specs, progress=progress)
    measured: dict[Bucket, list[Any]] = {bucket: [] for bucket in counts}
    with progress_bar(progress) as bar:
        picked = bar.track(chosen, description="Measuring gradients")
        on_mesh = prefetch_to_mesh(
            _load(batches, picked), batches.mesh, batch_axes=batches.batch_axes
        )
        for number, batch in enumerate(on_mesh):
            # The step selects the random keys, which no two batches share.
            numbered = dataclasses.replace(state, step=state.step + number)
            gradient_sum, sums = steps(numbered, batch)
            weight, examples = float(sums["weight"]), float(sums["num_examples"])
            mean = sketch(gradient_sum).astype(np.float64) / (weight or 1.0)
            # Makes room for the next gradient, which has the size of the parameters.
            del gradient_sum
            measured[batch.bucket].append((mean, weight, examples))
    samples = {bucket: _samples(results) for bucket, results in measured.items()}
    return BucketBias.of(counts, samples, batches.schedule.accumulate)


def _make_gradient_step(
    loss_fn: LossFn, state: TrainState, batches: MeshLoader, seed: int
) -> Callable[[TrainState, Batch], tuple[Any, Metrics]]:
    """Returns a jitted step, `(state, batch) -> (gradients of the loss sum, sums)`."""
    sums_fn, mesh = gradient_sums(loss_fn, updates_variables=True), batches.mesh
    global_sums = sum_over_batch(sums_fn, mesh, "jit", (), seed)

    def gradient_step(state: TrainState, batch: Batch) -> tuple[Any, Metrics]:
        return global_sums(state, batch)[0]

    # A gradient is sharded as its parameter is.
    shardings = jax.tree.map(lambda x: x.sharding, state.params)
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(gradient_step, out_shardings=(shardings, replicated))


def _samples(results: list[tuple[np.ndarray, float, float]]) -> GradientSamples:
    columns = zip(*results, strict=True)
    return GradientSamples(*(np.asarray(column, np.float64) for column in columns))


def _choose(
    batches: MeshLoader, batches_per_bucket: int, seed: int
) -> tuple[dict[Bucket, int], list[tuple[int, int]]]:
    """Chooses random batches of every bucket from the first whole epoch.

    Returns:
      The number of batches of each bucket in the epoch, shortest bucket first, and
      pairs of a step and the index of a micro-batch, in the order of the steps.
    """
    schedule = batches.schedule
    first = -(-batches.start_step // len(schedule)) * len(schedule)
    steps = range(first, first + len(schedule))
    bucket_of = [x.bucket for step in steps for x in schedule.micro_batches(step)]
    random = np.random.default_rng(seed)
    counts, chosen = {}, []
    for bucket in schedule.plan.buckets:
        places = np.flatnonzero([x == bucket for x in bucket_of])
        if len(places):
            counts[bucket] = len(places)
            number = min(batches_per_bucket, len(places))
            chosen += random.choice(places, number, replace=False).tolist()
    pairs = (divmod(place, schedule.accumulate) for place in sorted(chosen))
    return counts, [(first + step, index) for step, index in pairs]


def _load(batches: MeshLoader, places: Iterable[tuple[int, int]]) -> Iterator[Batch]:
    """Yields the rows of this process of each micro-batch."""
    for step, index in places:
        loaded = batches.dataset[step - batches.start_step]
        yield loaded if isinstance(loaded, Batch) else loaded[index]
