"""Batches of a schedule as global arrays on a mesh.

This is the only module that uses both Grain, which loads batches, and jax, which places
them on devices.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping

from jax.sharding import Mesh

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import check_integer
from jaxbucket.base.padding import PadValue
from jaxbucket.base.position import DataPosition
from jaxbucket.data.example import Sequences, Transform
from jaxbucket.data.pipeline import BatchDataset, batch_dataset
from jaxbucket.data.source import Source
from jaxbucket.data.workers import in_thread, iterate, worker_dataset
from jaxbucket.schedule.base import Schedule
from jaxbucket.sharding.global_batch import ToMesh, batch_specs
from jaxbucket.sharding.mesh import Axes, local_rows
from jaxbucket.train.waiting import Waiting


class MeshLoader:
    """The global batches of a run, each a `Batch` of `jax.Array`s on a mesh.

    The batches of `batch_dataset` for the rows of this process are made by workers, if
    any, and sent to the mesh in a thread, while devices work on earlier ones. Every
    iteration starts at `start_step`. If the schedule accumulates, it yields tuples of
    batches, which type checkers do not know. All processes of the mesh must create a
    loader with the same arguments.

    Example:
      >>> import jax, jaxbucket as jb
      >>> source = [{"tokens": [7] * n} for n in (3, 1, 4, 2)]
      >>> lengths = jb.measure_lengths(source, progress=False)
      >>> plan = jb.plan_buckets(lengths, max_tokens=8, num_buckets=2)
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> batches = MeshLoader(source, jb.BatchSchedule(plan, lengths), mesh)
      >>> sorted(batch.bucket for batch in batches)
      [Bucket(batch_size=2, seq_len=2), Bucket(batch_size=2, seq_len=4)]
      >>> resumed = batches.resume(batches.position(1))
      >>> len(batches), len(resumed), resumed.start_step
      (2, 1, 1)

    Args:
      source: examples by index, the same ones that were measured. For a `Mixture` with
        names, a mapping from name to source; then `sequences`, `pad_value` and
        `transform` may be mappings with the same names.
      schedule: assigns examples to the rows of a bucket for each step.
      mesh: the mesh on which batches are sharded.
      start_step: the first step to yield.
      num_steps: the step at which the run ends, counted from step 0 over all epochs;
        `math.inf` for an endless run. By default the end of the epoch of `start_step`.
      num_epochs: the length of the run in epochs of the schedule, as an alternative to
        `num_steps`.
      batch_axes: the mesh axes over which batches are sharded, as for
        `batch_sharding`.
      sequences: the features that are padded; by default those that the source
        declares, as a token file does, or else all features with a leading axis. For
        several sequences with lengths of their own, a mapping from sequence name to
        features. A feature in several of them, such as an image, has an axis for each,
        in the order of the mapping.
      pad_value: the padding value of each sequence, name -> number, 0 if not given; or
        a single number if there is only one sequence.
      transform: `(example, rng) -> example`, a random augmentation that preserves the
        length. It receives a copy of the example and a `np.random.Generator` that
        depends only on the schedule's seed and first step, the epoch and the index of
        the example.
      num_workers: the number of loading processes; 0 to load in threads of this
        process. A script with workers must guard its entry point with
        `if __name__ == "__main__":`.
      num_threads: the number of reading threads in each loading process.
      buffer_size: the number of batches that each loading process keeps ready, in
        addition to those that its threads are reading.
      prefetch: the number of batches in transfer, in addition to the one in use; 0 to
        make each when it is requested, without a thread.

    Attributes:
      dataset: the rows of this process, a `grain.MapDataset` of numpy batches.
      mesh: the mesh on which batches are sharded.
      batch_axes: the mesh axes over which batches are sharded, as for
        `batch_sharding`.

    Raises:
      ValueError: if the source does not have one example for each length, the batch
        axes do not divide a bucket's B, the mesh lacks one of them or has no device of
        this process, the steps are negative or in the wrong order, or a number of
        workers, threads or batches is negative. While iterating, if an example cannot
        be read, differs in length from its measurement, or contains a number that
        devices cannot represent.
    """

    def __init__(
        self,
        source: Source | Mapping[str, Source],
        schedule: Schedule,
        mesh: Mesh,
        *,
        start_step: int = 0,
        num_steps: float | None = None,
        num_epochs: int | None = None,
        batch_axes: Axes = None,
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
            worker_dataset,
            num_workers=num_workers,
            num_threads=num_threads,
            buffer_size=buffer_size,
        )
        # This checks the numbers. Nothing is read before the first batch is requested.
        self._load(self.dataset)
        self._prefetch = check_integer("prefetch", prefetch, least=0)
        self._waiting = Waiting()

    def __len__(self) -> int:
        """The number of steps from `start_step` to the end of the run."""
        return len(self.dataset)

    def __iter__(self) -> Iterator[Batch]:
        to_mesh = ToMesh(self.mesh, self.batch_axes, self.schedule.buckets)
        batches = iterate(self._load(self.dataset).map(to_mesh))
        self._waiting = Waiting()
        if self._prefetch:
            batches = in_thread(batches, self._prefetch)
        return self._waiting.during(batches)

    @property
    def data_wait(self) -> float:
        """The share of the last 100 steps for which the loop waited for a batch.

        It is what devices waited at most: less if the loop dispatches steps ahead of
        them, as jax does until a result is read. It is that of the newest iteration, 0
        before its second batch.
        """
        return self._waiting.share

    @property
    def schedule(self) -> Schedule:
        """The schedule, which assigns examples to rows for each step."""
        return self.dataset.schedule

    @property
    def start_step(self) -> int:
        """The step of the first batch."""
        return self.dataset.start_step

    @functools.cached_property
    def specs(self) -> dict[Bucket, Batch]:
        """Shapes, dtypes and shardings of the batches per bucket, for `compile_steps`.

        If components of a mixture have a bucket in common, but different features, the
        key of all but the first is a `ComponentBucket`.

        Raises:
          ValueError: if jax does not support the dtype of a feature.
        """
        specs: dict[Bucket, Batch] = {}
        for template in self.dataset.templates:
            for plan in template.plans:
                new = batch_specs(
                    plan,
                    template.example,
                    self.mesh,
                    batch_axes=self.batch_axes,
                    sequences=template.sequences,
                    max_segments=template.max_segments,
                )
                _add_specs(specs, new, template.component)
        return specs

    def position(self, step: int) -> DataPosition:
        """Returns the position to save together with a state after `step` updates.

        Args:
          step: the number of updates that the state has seen, `int(state.step)`.
        """
        return self.dataset.position(step)

    def resume(self, position: DataPosition) -> MeshLoader:
        """Returns a loader that continues at a position with the same batches.

        The batches are bit for bit those of the run that was never interrupted.

        Args:
          position: the position to resume from, as returned by `position`.

        Raises:
          ValueError: if the plan, the data, the seed, the order, `sequences`,
            `pad_value` or the name of the transform has changed, naming the change; if
            the run ends before the position; or if `position` is not a `DataPosition`.
        """
        resumed = copy.copy(self)
        resumed.dataset = self.dataset.resume(position)
        resumed._waiting = Waiting()
        return resumed


def _add_specs(
    specs: dict[Bucket, Batch], new: Mapping[Bucket, Batch], component: str
) -> None:
    """Adds the batches of a component that no other component has."""
    for bucket, batch in new.items():
        if bucket not in specs:
            specs[bucket] = batch
        elif batch not in specs.values():
            specs[bucket.of(component)] = batch
