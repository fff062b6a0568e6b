"""Measures how the gradients of buckets differ from the gradient of the data.

A batch of one bucket has examples of similar lengths, so its gradient is that of these
lengths. The order of the steps makes up for this over time, but every single update
is further away from the mean gradient than an update from examples of all lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxbucket.base.batch import EMPTY_ROW, Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import check_integer, check_seed
from jaxbucket.base.progress import progress_bar
from jaxbucket.compile.steps import compile_steps
from jaxbucket.sharding import prefetch_to_mesh
from jaxbucket.train.bias_report import BucketBias
from jaxbucket.train.gradient_sketch import make_sketch_step
from jaxbucket.train.loss import LossFn
from jaxbucket.train.state import TrainState

if TYPE_CHECKING:
    from jaxbucket.train.loader import MeshLoader

# Steps that are searched for batches of every bucket.
_MAX_STEPS_SEARCHED = 4096


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
    few hundred steps rather than at the first step. The measurement takes about as long
    as `batches_per_bucket` training steps of every bucket, and compiles one program for
    each. All processes of the mesh must call this function.

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
      >>> [x.bucket.seq_len for x in bias.buckets], bias.between > bias.within
      ([4, 8], True)

    Args:
      loss_fn: the loss, as for `make_train_step`.
      state: the state whose parameters the gradients are taken at.
      batches: the loader of the run. Its schedule may be for padded or packed rows, and
        micro-batches are measured one by one.
      batches_per_bucket: the number of batches to measure in each bucket, at least 2.
      seed: the seed of the keys that the loss receives.
      progress: whether to show progress bars on a terminal.

    Returns:
      The bias and the noise of each bucket, and what other orders would change.

    Raises:
      ValueError: if `batches_per_bucket` is below 2, or the loss breaks its contract.
    """
    if check_integer("batches_per_bucket", batches_per_bucket) < 2:
        raise ValueError(
            f"`batches_per_bucket={batches_per_bucket}` is too small to estimate "
            "noise. Measure at least 2 batches of every bucket."
        )
    counts, chosen = _choose(batches, batches_per_bucket)
    step_fn = make_sketch_step(loss_fn, batches, check_seed(seed))
    specs = {bucket: batches.specs[bucket] for bucket in counts}
    steps = compile_steps(step_fn, state, specs, progress=progress)
    with progress_bar(progress) as bar:
        picked = bar.track(chosen, description="Measuring gradients")
        on_mesh = prefetch_to_mesh(
            _load(batches, picked), batches.mesh, batch_axes=batches.batch_axes
        )
        results = [(batch.bucket, steps(state, batch)) for batch in on_mesh]
    sketches: dict[Bucket, list[Any]] = {bucket: [] for bucket in counts}
    weights: dict[Bucket, list[float]] = {bucket: [] for bucket in counts}
    for bucket, result in results:
        sketches[bucket].append(np.asarray(result["sketch"], np.float64))
        weights[bucket].append(float(result["weight"]))
    stacked = {bucket: np.stack(x) for bucket, x in sketches.items()}
    return BucketBias.of(counts, stacked, weights, batches.schedule.accumulate)


def _choose(
    batches: MeshLoader, batches_per_bucket: int
) -> tuple[dict[Bucket, int], list[tuple[int, int]]]:
    """Chooses batches of every bucket, in the order of the steps.

    Returns:
      The number of batches of each bucket that were seen, shortest bucket first, and
      pairs of a step and the index of a micro-batch. Buckets with a single batch are
      left out, because their noise cannot be estimated.
    """
    places: dict[Bucket, list[tuple[int, int]]] = {}
    schedule, start = batches.schedule, batches.start_step
    for step in range(start, start + min(len(schedule), _MAX_STEPS_SEARCHED)):
        for index, micro in enumerate(schedule.micro_batches(step)):
            if np.any(micro.rows != EMPTY_ROW):
                places.setdefault(micro.bucket, []).append((step, index))
    places = {bucket: x for bucket, x in places.items() if len(x) > 1}
    if not places:
        raise ValueError(
            "No bucket has two batches in an epoch, so the noise of gradients cannot "
            "be estimated. Plan with fewer buckets or a smaller `max_tokens`."
        )
    buckets = sorted(places, key=lambda bucket: bucket.seq_len)
    chosen = [place for x in places.values() for place in x[:batches_per_bucket]]
    return {bucket: len(places[bucket]) for bucket in buckets}, sorted(chosen)


def _load(batches: MeshLoader, places: Iterable[tuple[int, int]]) -> Iterator[Batch]:
    """Yields the rows of this process of each micro-batch."""
    for step, index in places:
        loaded = batches.dataset[step - batches.start_step]
        yield loaded if isinstance(loaded, Batch) else loaded[index]
