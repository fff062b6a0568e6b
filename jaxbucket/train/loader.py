"""Batches of a schedule as global arrays on a mesh.

The one module that knows both Grain, which loads batches, and jax, which places them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import check_integer
from jaxbucket.base.padding import PadValue
from jaxbucket.base.position import DataPosition
from jaxbucket.data.example import Sequences
from jaxbucket.data.pipeline import BatchDataset, batch_dataset
from jaxbucket.data.source import Source
from jaxbucket.data.transform import Transform
from jaxbucket.data.workers import load_in_workers
from jaxbucket.schedule.base import Schedule
from jaxbucket.sharding import (
    DATA_AXIS,
    Axes,
    batch_specs,
    local_rows,
    prefetch_to_mesh,
)


class MeshLoader:
    """The global batches of a run, each a `Batch` of `jax.Array`s on a mesh.

    It is `batch_dataset` of the rows that this process holds, `load_in_workers` and
    `prefetch_to_mesh` in one. Every loop over it begins at `start_step`; where the
    schedule accumulates, it gives tuples of batches. All processes of the mesh make one
    with the same arguments.

    Example:
      >>> import jax, jaxbucket as jb
      >>> source = [{"tokens": [7] * n} for n in (3, 1, 4, 2)]
      >>> lengths = jb.measure_lengths(source, progress=False)
      >>> plan = jb.plan_buckets(lengths, max_tokens=8, num_buckets=2)
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> batches = MeshLoader(source, jb.BatchSchedule(plan, lengths), mesh)
      >>> sorted(batch.bucket for batch in batches)
      [Bucket(batch_size=2, seq_len=3), Bucket(batch_size=2, seq_len=4)]
      >>> resumed = batches.resume(batches.position(1))
      >>> len(batches), len(resumed), resumed.start_step
      (2, 1, 1)

    Args:
      source: examples by index, the ones that were measured.
      schedule: which examples fill which bucket at which step.
      mesh: where the rows go.
      start_step: the first step to give; by default the schedule's first.
      num_steps: where the run ends, counted from step 0 and over epochs; `math.inf`
        for a run without end. By default the end of the epoch that `start_step` is in.
      num_epochs: the same in epochs of the schedule, instead.
      batch_axes: the mesh axes that cut the rows.
      sequences: the features that are padded, by default those of the source, if it
        has its own as a token file has, or else all with a leading axis. A mapping,
        name -> features, of several sequences with lengths of their own.
      pad_value: what fills them behind their end: name -> number, 0 for those without
        one. A number alone is of the only one there is.
      transform: `(example, rng) -> example`, random augmentation that keeps the length.
        It gets a copy of the example, and a `np.random.Generator` that depends on the
        schedule's seed and first step, the epoch and the index of the example alone.
      num_workers: processes that load; 0 for threads of this one alone. A script with
        workers keeps what it runs behind `if __name__ == "__main__":`.
      num_threads: of each of these processes, which read batches.
      buffer_size: batches that each of these processes has ready, beside those that its
        threads read.
      prefetch: how many batches to keep in transfer beside the one in use.

    Attributes:
      dataset: the rows of this process, a `grain.MapDataset` of numpy batches.
      mesh: where the rows go.
      batch_axes: the mesh axes that cut the rows.

    Raises:
      ValueError: if the source has not one example for each length, the batch axes do
        not divide a bucket's B, the mesh lacks one of them or has no device of this
        process, the steps are negative or in the wrong order, or a number of workers,
        threads or batches is negative. And from a batch, if an example cannot be read,
        is not as long as it was measured, or has a number that devices cannot hold.
    """

    def __init__(
        self,
        source: Source,
        schedule: Schedule,
        mesh: Mesh,
        *,
        start_step: int | None = None,
        num_steps: float | None = None,
        num_epochs: int | None = None,
        batch_axes: Axes = DATA_AXIS,
        sequences: Sequences = None,
        pad_value: PadValue = 0,
        transform: Transform | None = None,
        num_workers: int = 0,
        num_threads: int = 4,
        buffer_size: int = 2,
        prefetch: int = 2,
    ):
        self.mesh = mesh
        self.batch_axes = batch_axes
        self.dataset: BatchDataset = batch_dataset(
            source,
            schedule,
            shard=local_rows(mesh, batch_axes=batch_axes),
            start_step=start_step,
            num_steps=num_steps,
            num_epochs=num_epochs,
            sequences=sequences,
            pad_value=pad_value,
            transform=transform,
        )
        self._load = functools.partial(
            load_in_workers,
            num_workers=num_workers,
            num_threads=num_threads,
            buffer_size=buffer_size,
        )
        # Nothing is read before the first batch is asked for: this checks the numbers.
        self._load(self.dataset)
        if check_integer("prefetch", prefetch) < 0:
            raise ValueError(f"`prefetch={prefetch}` must not be negative.")
        self._prefetch = prefetch

    def __len__(self) -> int:
        """The number of steps from `start_step` to the end of the run."""
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        return prefetch_to_mesh(
            self._load(self.dataset),
            self.mesh,
            batch_axes=self.batch_axes,
            size=self._prefetch,
        )

    @property
    def schedule(self) -> Schedule:
        """Which examples are in which rows at which step."""
        return self.dataset.schedule

    @property
    def start_step(self) -> int:
        """The step that the first batch is of."""
        return self.dataset.start_step

    @functools.cached_property
    def specs(self) -> dict[Bucket, Batch]:
        """Bucket -> shapes, dtypes and shardings of its batches, for `compile_steps`.

        Raises:
          ValueError: if jax has no arrays of a feature's dtype.
        """
        return batch_specs(
            self.schedule.plan,
            self.dataset.example,
            self.mesh,
            batch_axes=self.batch_axes,
            sequences=self.dataset.sequences,
            max_segments=self.schedule.max_segments,
            capacities=self.schedule.capacities,
        )

    def position(self, step: int) -> DataPosition:
        """Returns what to save beside a state that has done `step` updates.

        Args:
          step: how many updates the state has done, `int(state.step)`.
        """
        return self.dataset.position(step)

    def resume(self, position: DataPosition) -> MeshLoader:
        """Returns the batches that follow a position, bit for bit those of its run.

        Args:
          position: what `position` returned in the run that is resumed.

        Raises:
          ValueError: if the plan, the data, the seed, the order, `sequences`,
            `pad_value` or the name of the transform is not what it was; it names what
            has changed. Or if the run ends before the position, or `position` is not a
            `DataPosition`.
        """
        resumed = copy.copy(self)
        resumed.dataset = self.dataset.resume(position)
        return resumed
