"""Batches of a stream whose lengths are not known in advance."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Mapping
from typing import Any

import grain
import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_positive
from jaxbucket.base.policies import Group
from jaxbucket.base.position import DataPosition
from jaxbucket.base.process_group import ProcessGroup
from jaxbucket.base.row_shard import RowShard, checked_shard
from jaxbucket.base.sizes import check_sequence_names
from jaxbucket.data.example import Example, copy_features
from jaxbucket.data.example_spec import check_not_nested
from jaxbucket.data.measure import unnamed
from jaxbucket.stream.estimate import StepEstimate, estimate_steps
from jaxbucket.stream.examples import EpochDataset, ExampleStream, as_stream
from jaxbucket.stream.iterator import StreamIterator
from jaxbucket.stream.overlong import LengthLimits
from jaxbucket.stream.reader import StreamReader
from jaxbucket.stream.run import Plans, Policy, Samples, StreamRun

# Numbers the streams of a run, in the same order in all processes.
_stream_numbers = itertools.count()


def stream_batches(
    dataset: ExampleStream | grain.IterDataset | EpochDataset,
    plan: Plans,
    *,
    pool_size: int,
    policy: Policy = "closest",
    max_segments_per_row: int | None = None,
    accumulate: int = 1,
    group: Group = "same",
    num_steps: int | None = None,
    lengths: Samples | None = None,
    shard: RowShard | None = None,
    processes: ProcessGroup | None = None,
) -> StreamDataset:
    """Returns a `grain.IterDataset` of batches of a stream, in the shapes of a plan.

    A single process chooses for each step a bucket that its pool can fill. Several
    processes share one sequence of buckets, so that all of them are in the same bucket
    at every step, and each fills its rows from its own stream. A process whose stream
    has ended yields empty rows. With `processes`, the processes tell one another when
    their streams end, and all stop after the same step, once every example has been
    served. Without it, several processes stop only at `num_steps`.

    Once `16 * pool_size` later examples have arrived, a pending example is overdue, and
    takes precedence in the next step that it fits into.

    Example:
      >>> import grain, jaxbucket as jb
      >>> source = [{"tokens": [7] * n} for n in (3, 1, 4, 2)]
      >>> dataset = grain.MapDataset.source(source).to_iter_dataset()
      >>> lengths = jb.stream.sample_lengths(dataset, 100)
      >>> plan = jb.plan_buckets(lengths, max_tokens=8, num_buckets=2, sample=True)
      >>> batches = stream_batches(dataset, plan, pool_size=4)
      >>> [batch.bucket for batch in batches]
      [Bucket(batch_size=2, seq_len=3), Bucket(batch_size=2, seq_len=4)]

    Args:
      dataset: the examples, dicts of arrays: a `grain.IterDataset`, a function
        `(epoch, seed) -> dataset`, or an `ExampleStream` with options for reading them.
      plan: the shapes; or a dict `{first step: plan}` that includes step 0. All plans
        must have the same longest T and the same policy for overlong examples. With
        several sequences, they must also hold all shapes of the first one, which
        decides which examples are overlong.
      pool_size: the maximum number of pending examples in this process. Choose a few
        times the largest B. It limits the memory use and the size of a checkpoint.
      policy: in a single process, "first" chooses the bucket of the oldest example.
        "closest" chooses the bucket with the most full batches or, if there are none,
        the one with the least unused space. A packed row is filled with the longest
        example that fits ("closest") or with the oldest ("first"). Several processes
        follow the shared sequence of buckets, so both policies give them the same
        padded rows.
      max_segments_per_row: the largest number of examples in a row, which are packed;
        by default every example has a row of its own. Packed examples must have one
        length. Features with one number per example are `[B, max_segments_per_row]`.
      accumulate: the number of micro-batches of a step. Above 1, each step is a tuple
        of batches.
      group: whether the micro-batches of a step have the "same" bucket or are "mixed".
      num_steps: the step at which the run ends, counted from step 0; by default it ends
        with the stream.
      lengths: `[N]` integers, the lengths that the plan was made for, equal in all
        processes, or a mapping from each of several sequences to its `[N]`; or a dict
        `{first step: lengths}` with the steps of `plan`. Required with several
        processes, because the sequence of buckets is derived from them.
      shard: the rows of this process, from `local_rows(mesh)`; all rows by default.
      processes: the `Processes` of the run, if there are several. All of them must make
        the same streams in the same order, and iterate over each of them equally often.

    Raises:
      ValueError: if the pool is smaller than the rows of a batch, the plans are
        incompatible, `lengths` or `processes` is missing, `sequences` names others than
        the plan, rows of several sequences are to be packed, or an option is out of
        range.
        From an iterator: if an example is too long, has no length or makes `transform`
        fail; or if processes batch differently.
      Exception: from an iterator, any error of the stream. A note names the example.
    """
    run = StreamRun(
        examples=as_stream(dataset),
        plan=plan,
        lengths=lengths,
        pool_size=pool_size,
        policy=policy,
        shard=checked_shard(shard),
        processes=processes,
        accumulate=accumulate,
        group=group,
        num_steps=num_steps,
        max_segments=max_segments_per_row,
    )
    for phase in run.phases:
        _warn_of_small_batches(phase.plan)
    return StreamDataset(run)


def _warn_of_small_batches(plan: BucketPlan) -> None:
    """Warns of a plan whose B are those of few lengths, such as of a sample."""
    largest = plan.largest_batch
    # Equal B may be those of `max_batch_size`.
    differ = len(set(plan.batch_sizes.tolist())) > 1
    if differ and isinstance(plan.max_tokens, int) and 2 * largest <= plan.max_tokens:
        warnings.warn(
            f"The batches of `plan` have up to {largest} of `max_tokens="
            f"{plan.max_tokens}` positions. If its lengths are a sample of the stream, "
            "plan with `sample=True`.",
            stacklevel=3,
        )


def sample_lengths(
    dataset: ExampleStream | grain.IterDataset | EpochDataset, num_examples: int
) -> Any:
    """Returns the lengths of the first examples of a stream, to plan buckets for.

    The examples are read from a new iterator, so the stream itself does not advance.

    Example:
      >>> import grain
      >>> source = [{"tokens": [7] * n, "labels": [n]} for n in (3, 1, 4, 2)]
      >>> dataset = grain.MapDataset.source(source).to_iter_dataset()
      >>> sample_lengths(ExampleStream(dataset, sequences=["tokens"]), 3)
      array([3, 1, 4], dtype=int32)
      >>> sequences = {"tokens": ["tokens"], "labels": ["labels"]}
      >>> sample_lengths(ExampleStream(dataset, sequences=sequences), 3)["labels"]
      array([1, 1, 1], dtype=int32)

    Args:
      dataset: the examples, as for `stream_batches`; epoch 0 is read.
      num_examples: the number of examples to read; fewer if the stream is shorter.

    Returns:
      `[N]` int32, after `transform`; or, if `sequences` is a mapping, a mapping from
      each sequence to `[N]` int32.

    Raises:
      ValueError: if there is no example, or an example has no length; or if
        `sequences` is a mapping with fewer than two sequences.
      Exception: any error of the stream. A note names the example.
    """
    examples = dataclasses.replace(as_stream(dataset), num_epochs=1)
    check_positive("num_examples", num_examples)
    names: list[str] = []
    if isinstance(examples.sequences, Mapping):
        check_sequence_names("sequences", examples.sequences)
        names = sorted(examples.sequences)
    reader = StreamReader(examples, LengthLimits(tuple(names), examples.sequences))
    lengths = []
    first: list[Example] = []
    while len(lengths) < num_examples and (read := reader.read()):
        first = first or [read[0].example]
        lengths.append(read[0].lengths)
    reader.close()
    columns = np.array(lengths, np.int32).T
    by_name = dict(zip(names or [None], columns, strict=True))
    check_not_nested(first, examples.sequences, by_name)
    return unnamed(by_name)


class StreamDataset(grain.IterDataset[Batch]):
    """The batches of a stream, created by `stream_batches`."""

    def __init__(self, run: StreamRun):
        super().__init__()
        self._run = run
        # The same numbers name a stream and its iterators in all processes.
        self._number = next(_stream_numbers) if run.meets else None
        self._num_iterators = 0

    def __iter__(self) -> StreamIterator:
        name = f"stream {self._number}, reading {self._num_iterators}"
        self._num_iterators += 1
        return StreamIterator(self._run, name)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Refuses Grain's workers, each of which would have a pool of its own."""
        raise ValueError(
            "Batches of a stream cannot be made in workers. Use workers for its "
            "examples, `stream.mp_prefetch(...)`."
        )

    @property
    def plan(self) -> BucketPlan:
        """The plan of the first step."""
        return self._run.phases[0].plan

    @property
    def max_segments(self) -> int | None:
        """The largest number of examples in a packed row; None without packing."""
        return self._run.max_segments

    @property
    def example(self) -> dict[str, np.ndarray]:
        """A transformed example with the features of the batches, for `batch_specs`.

        This is `like` if it was given. If not, the first example is read from a new
        iterator over the stream.

        Raises:
          ValueError: if the stream is empty and `like` was not given.
          Exception: any error of the stream.
        """
        like = self._run.examples.like
        return copy_features(like or self._run.new_reader().first_example())

    @property
    def fingerprint(self) -> str:
        """32 hex digits of everything that batches depend on, except the stream."""
        return self._run.fingerprint

    def steps_per_epoch(self, num_examples: int) -> StepEstimate:
        """Estimates the steps of an epoch, from the lengths of the first plan.

        Example:
          >>> import jaxbucket as jb
          >>> lengths = np.random.default_rng(0).integers(1, 100, 2000)
          >>> plan = jb.plan_buckets(lengths, max_tokens=800, sample=True)
          >>> dataset = grain.MapDataset.source([{"x": [1]}]).to_iter_dataset()
          >>> batches = stream_batches(dataset, plan, pool_size=500, lengths=lengths)
          >>> steps, error = batches.steps_per_epoch(num_examples=1_000_000)
          >>> print(f"{steps:,.0f} steps, off by up to {error:,.0f}")
          72,742 steps, off by up to 1,582

        Args:
          num_examples: the number of examples in an epoch.

        Returns:
          The number of steps, and by how much it may be wrong. Packed rows need a pool
          that is several times larger than the largest batch.

        Raises:
          ValueError: if fewer than 16 `lengths` were given, or `num_examples` is below
            their number.
        """
        phase = self._run.phases[0]
        if phase.known is None:
            raise ValueError(
                "`lengths` is missing, so the steps of an epoch cannot be estimated. "
                "Pass `stream_batches(lengths=...)`, the lengths of the plan."
            )
        return estimate_steps(
            phase.plan,
            phase.known,
            check_positive("num_examples", num_examples),
            self.max_segments,
            self._run.accumulate,
        )

    def position(self, step: int) -> DataPosition:
        """Returns the position that processes compare and that checkpoints hold.

        It does not include the state of the stream. Save
        `StreamIterator.state_before(step)` alongside it.

        Args:
          step: the next step.
        """
        return self._run.position(step)
