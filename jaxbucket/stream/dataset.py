"""Batches of a stream whose lengths are not known in advance.

Examples are collected in a pool. Each batch takes its examples from the pool and has
one of the shapes of a plan.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import overload

import grain
import numpy as np

from jaxbucket.base.batch import Batch, RowShard, checked_shard
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_accumulate, check_positive, check_seed
from jaxbucket.base.digest import digest
from jaxbucket.base.padding import PadValue, check_pad_value
from jaxbucket.base.policies import Group
from jaxbucket.base.position import DataPosition
from jaxbucket.base.process_group import ProcessGroup
from jaxbucket.base.sizes import check_sequence_names
from jaxbucket.data.example import Example, Sequences, copy_features
from jaxbucket.data.measure import unnamed
from jaxbucket.data.sequence_axes import check_not_nested
from jaxbucket.data.transform import StreamTransform, Transform, check_transform
from jaxbucket.stream.drift import OnDrift, warn_of_drift
from jaxbucket.stream.epochs import Stream, check_stream, open_epoch
from jaxbucket.stream.iterator import StreamIterator
from jaxbucket.stream.loader_stream import rewind
from jaxbucket.stream.options import Options, Policy, checked_sequences
from jaxbucket.stream.overlong import LengthLimits
from jaxbucket.stream.phases import Plans, Samples, checked_plans, make_phases
from jaxbucket.stream.reader import StreamReader
from jaxbucket.stream.run import StreamRun

# The default of `max_wait`, as a multiple of `pool_size`.
_POOLS_TO_WAIT = 16
# Numbers the streams of a run, in the same order in all processes.
_stream_numbers = itertools.count()


def stream_batches(
    dataset: Stream,
    plan: Plans,
    *,
    pool_size: int,
    policy: Policy = "closest",
    lengths: Samples | None = None,
    shard: RowShard | None = None,
    processes: ProcessGroup | None = None,
    accumulate: int = 1,
    group: Group = "same",
    num_steps: float | None = None,
    num_epochs: int | None = 1,
    pack: bool = False,
    max_segments_per_row: int | None = None,
    max_wait: int | None = None,
    sequences: Sequences = None,
    pad_value: PadValue = 0,
    like: Example | None = None,
    seed: int = 0,
    on_drift: OnDrift | None = warn_of_drift,
    transform: Transform | None = None,
) -> StreamDataset:
    """Returns a `grain.IterDataset` of batches of a stream, in the shapes of a plan.

    A single process chooses for each step a bucket that its pool can fill. Several
    processes share one sequence of buckets, so that all of them are in the same bucket
    at every step, and each fills its rows from its own stream. A process whose stream
    has ended yields empty rows. With `processes`, the processes tell one another when
    their streams end, and all stop after the same step, once every example has been
    served. Without it, several processes stop only at `num_steps`.

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
      dataset: the examples, dicts of arrays. Each process passes a different stream,
        unless it has the same rows as another process. A function
        `(epoch, seed) -> dataset` is called for each epoch, with a 32-bit seed that is
        derived from `seed`.
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
      lengths: `[N]` integers, the lengths that the plan was made for, equal in all
        processes, or a mapping from each of several sequences to its `[N]`; or a dict
        `{first step: lengths}` with the steps of `plan`. Required with several
        processes, because the sequence of buckets is derived from them.
      shard: the rows of this process, from `local_rows(mesh)`; all rows by default.
      processes: the `Processes` of the run, if there are several. All of them must make
        the same streams in the same order, and iterate over each of them equally often.
      accumulate: the number of micro-batches of a step. Above 1, each step is a tuple
        of batches.
      group: whether the micro-batches of a step have the "same" bucket or are "mixed".
      num_steps: the step at which the run ends, counted from step 0; by default it ends
        with the stream. `math.inf` for no end, if the loop stops with `StreamEnd`.
      num_epochs: the number of times that the stream is read; None to repeat it
        forever. Batches may mix the examples of consecutive epochs. A run may resume
        with a different number, unless its stream had already ended. With a number of
        epochs that have already begun, it ends with the epoch that is being read.
      pack: whether a row may hold several examples, which must have one length.
      max_segments_per_row: the largest number of examples in a packed row; by default
        the largest number in rows packed from `lengths`.
      max_wait: the number of later examples that may arrive before a pending example
        takes precedence, in the next step that it fits into; 16 times `pool_size` by
        default.
      sequences: the features that are padded; by default all with a leading axis. If
        examples have several sequences: a mapping from each to the features that share
        its length, by default only itself. A feature in several of them has an axis for
        each, in the order of the mapping.
      pad_value: the value of padding: a number for all sequences, or a dict
        `{feature: number}`.
      like: an example with the features that `transform` returns, needed if the stream
        of a process may be empty.
      seed: the seed of the epochs' seeds and of the sequence of buckets.
      on_drift: a function that is called with a `Drift` if the lengths have drifted
        from those that the plan was made for; by default it warns. None to disable it.
      transform: `(example, rng) -> example`, random augmentation, which may change the
        length. Its example is a copy, a dict of arrays; bytes are `[]` arrays of
        objects, `example["audio"].item()`. Its `np.random.Generator` depends on `seed`,
        the epoch, the index of the example in its stream, and the stream: the first
        part of `shard`, and the worker. Seed any other generator from it, by
        `rng.integers(2**63)` or `rng.spawn(1)`.

    Raises:
      ValueError: if the pool is smaller than the rows of a batch, the plans are
        incompatible, `lengths` or `processes` is missing, `sequences` names others than
        the plan, rows of several sequences are to be packed, or an option is out of
        range.
        From an iterator: if an example is too long, has no length or makes `transform`
        fail, naming its index in the stream; or if processes batch differently.
      RuntimeError: from an iterator, if the stream raises, naming the example as well.
    """
    check_stream(dataset)
    plans = checked_plans(plan)
    for each in plans.values():
        _warn_of_small_batches(each)
    pool_size = check_positive("pool_size", pool_size)
    if max_wait is None:
        max_wait = _POOLS_TO_WAIT * pool_size
    options = Options(
        pool_size=pool_size,
        policy=policy,
        shard=checked_shard(shard),
        accumulate=check_accumulate(accumulate),
        group=group,
        num_steps=None
        if num_steps in (None, math.inf)
        else check_positive("num_steps", num_steps),
        num_epochs=None
        if num_epochs is None
        else check_positive("num_epochs", num_epochs),
        pack=bool(pack),
        max_wait=check_positive("max_wait", max_wait),
        sequences=checked_sequences(sequences, plans[0].sequences),
        pad_value=check_pad_value(pad_value),
        seed=check_seed(seed),
        transform=check_transform(transform),
    )
    phases = make_phases(plans, lengths, options, max_segments_per_row)
    _check_processes(processes, options, num_steps)
    if processes is not None and processes.count == 1 and options.is_single_process:
        processes = None
    return StreamDataset(StreamRun(dataset, phases, options, like, on_drift, processes))


def _warn_of_small_batches(plan: BucketPlan) -> None:
    """Warns of a plan whose B are those of few lengths, such as of a sample."""
    largest = max(bucket.num_tokens for bucket in plan.buckets)
    # Equal B may be those of `max_batch_size`.
    differ = len(set(plan.batch_sizes.tolist())) > 1
    if differ and isinstance(plan.max_tokens, int) and 2 * largest <= plan.max_tokens:
        warnings.warn(
            f"The batches of `plan` have up to {largest} of `max_tokens="
            f"{plan.max_tokens}` positions. If its lengths are a sample of the stream, "
            "plan with `sample=True`.",
            stacklevel=3,
        )


def _check_processes(
    processes: ProcessGroup | None, options: Options, num_steps: float | None
) -> None:
    if processes is not None and not hasattr(processes, "gather"):
        raise ValueError(
            f"`processes={processes!r}` has no `gather` method. Pass the `Processes` "
            "of the run."
        )
    has_end = num_steps is None and options.num_epochs is not None
    if has_end and processes is None and not options.is_single_process:
        raise ValueError(
            "`processes` is missing. This process has only a part of the rows and "
            "cannot see when the streams of the others end. Pass the `Processes` of "
            "the run, or `num_steps`: `math.inf` if `StreamEnd` ends the loop."
        )


@overload
def sample_lengths(
    dataset: Stream,
    num_examples: int,
    *,
    sequences: Mapping[str, Sequence[str]],
    seed: int = 0,
    transform: Transform | None = None,
) -> dict[str, np.ndarray]: ...


@overload
def sample_lengths(
    dataset: Stream,
    num_examples: int,
    *,
    sequences: Sequence[str] | None = None,
    seed: int = 0,
    transform: Transform | None = None,
) -> np.ndarray: ...


def sample_lengths(
    dataset: Stream,
    num_examples: int,
    *,
    sequences: Sequences = None,
    seed: int = 0,
    transform: Transform | None = None,
) -> np.ndarray | dict[str, np.ndarray]:
    """Returns the lengths of the first examples of a stream, to plan buckets for.

    The examples are read from a new iterator, so the stream itself does not advance.

    Example:
      >>> import grain
      >>> source = [{"tokens": [7] * n, "labels": [n]} for n in (3, 1, 4, 2)]
      >>> dataset = grain.MapDataset.source(source).to_iter_dataset()
      >>> sample_lengths(dataset, 3, sequences=["tokens"])
      array([3, 1, 4], dtype=int32)
      >>> sequences = {"tokens": ["tokens"], "labels": ["labels"]}
      >>> sample_lengths(dataset, 3, sequences=sequences)["labels"]
      array([1, 1, 1], dtype=int32)

    Args:
      dataset: the examples, dicts of arrays; or a function `(epoch, seed) -> dataset`,
        of which epoch 0 is read.
      num_examples: the number of examples to read; fewer if the stream is shorter.
      sequences: the features whose length counts; by default all with a leading axis.
        If examples have several sequences, each with its own length: a mapping from
        each sequence to the features that share its length.
      seed: the seed of epoch 0 and of `transform`.
      transform: `(example, rng) -> example`, applied before the length is measured.
        Pass the same function as to `stream_batches`.

    Returns:
      `[N]` int32; or a mapping from each of several sequences to `[N]` int32.

    Raises:
      ValueError: if there is no example, or an example has no length; or if
        `sequences` is a mapping with fewer than two sequences.
      RuntimeError: if the stream raises.
    """
    check_stream(dataset)
    num_examples = check_positive("num_examples", num_examples)
    names: list[str] = []
    if isinstance(sequences, Mapping):
        check_sequence_names("sequences", sequences)
        names = sorted(sequences)
    reader = StreamReader(
        open_epoch=functools.partial(open_epoch, dataset, seed=check_seed(seed)),
        num_epochs=1,
        limits=LengthLimits.unlimited(names, checked_sequences(sequences, names)),
        transform=StreamTransform(check_transform(transform), seed),
        snapshot_every=num_examples + 1,
    )
    lengths = []
    first: list[Example] = []
    while len(lengths) < num_examples and (examples := reader.read()):
        first = first or [examples[0].example]
        lengths.append(examples[0].lengths)
    reader.close()
    rewind(reader.dataset)
    columns = np.array(lengths, np.int32).T
    by_name = dict(zip(names or [None], columns, strict=True))
    check_not_nested(first, sequences, by_name)
    return unnamed(by_name)


class StreamDataset(grain.IterDataset[Batch]):
    """The batches of a stream, created by `stream_batches`."""

    def __init__(self, run: StreamRun):
        dataset = run.dataset
        super().__init__(dataset if isinstance(dataset, grain.IterDataset) else ())
        self._run = run
        # The same numbers name a stream and its iterators in all processes.
        self._number = None if run.processes is None else next(_stream_numbers)
        self._num_iterators = 0

    def __iter__(self) -> StreamIterator:
        name = f"stream {self._number}, reading {self._num_iterators}"
        self._num_iterators += 1
        return StreamIterator(self._run, name)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Restricts the dataset to a worker's share of the examples and steps."""
        self._check_no_worker()
        self._run = self._run.sliced(sl, sequential_slice)

    def __getstate__(self) -> object:
        # Grain pickles the dataset to send it to its workers.
        self._check_no_worker()
        return super().__getstate__()

    def _check_no_worker(self) -> None:
        if self._run.processes is not None:
            raise ValueError(
                "`processes` cannot be used in a worker, because workers cannot "
                "communicate with the other processes. Use workers in the stream, "
                "`stream.mp_prefetch(...)`, or omit `processes` and stop by "
                "`StreamEnd`."
            )

    @property
    def accumulate(self) -> int:
        """The number of micro-batches in a step."""
        return self._run.options.accumulate

    @property
    def shard(self) -> RowShard:
        """The rows of this process."""
        return self._run.options.shard

    @property
    def plan(self) -> BucketPlan:
        """The plan of the first step."""
        return self._run.phases[0].plan

    @property
    def max_segments(self) -> int | None:
        """The largest number of examples in a packed row; None without packing."""
        return self._run.phases[0].max_segments

    @property
    def example(self) -> dict[str, np.ndarray]:
        """A transformed example with the features of the batches, for `batch_specs`.

        This is `like` if it was given. If not, the first example is read from a new
        iterator over the stream.

        Raises:
          ValueError: if the stream is empty and `like` was not given, or if
            `transform` fails.
          RuntimeError: if the stream raises.
        """
        example = self._run.like
        if example is None:
            example = self._run.new_reader().first_example()
        if example is None:
            raise ValueError(
                "The stream has no example, so the features of its batches are not "
                "known. Pass an example as `like`."
            )
        return copy_features(example)

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits of everything that batches depend on, except the stream."""
        return digest(json.dumps(self._run.config(), sort_keys=True).encode())

    def position(self, step: int) -> DataPosition:
        """Returns the position that processes compare and that checkpoints hold.

        It does not include the state of the stream. Save
        `StreamIterator.state_before(step)` alongside it.

        Args:
          step: the next step.
        """
        # The plan of the next step may change until this step is done.
        phase = self._run.phase_at(max(step - 1, 0))
        plan = {**json.loads(phase.plan.to_json()), "fingerprint": phase.fingerprint}
        sample = phase.sample
        data = {"lengths": "unknown", "fingerprint": digest(b"")}
        if sample is not None:
            data = {
                "lengths": len(sample),
                "tokens": int(sample.sum(dtype=np.int64)),
                "fingerprint": digest(np.ascontiguousarray(sample, "<i8").data),
            }
        return DataPosition(
            step,
            {name: plan[name] for name in plan if name not in ("format", "version")},
            data,
            {
                **self._run.config(before=step),
                "later_plans": self._run.later_plans(step),
                "processes": self._run.num_processes,
                "fingerprint": self.fingerprint,
            },
        )
