"""A stream of examples, whose lengths nobody knows before, to batches of a plan.

A pool of examples is kept, and every batch is cut from it in one of the plan's shapes.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grain
import numpy as np

from jaxbucket.base.batch import RowShard
from jaxbucket.base.buckets import BucketPlan, Group
from jaxbucket.base.checks import (
    MAX_LENGTH,
    check_accumulate,
    check_positive,
    check_seed,
)
from jaxbucket.base.digest import digest
from jaxbucket.base.padding import PadValue, check_pad_value
from jaxbucket.base.peers import ProcessGroup
from jaxbucket.base.permutation import fold
from jaxbucket.base.position import DataPosition
from jaxbucket.data.example import Example, copied, listed_names
from jaxbucket.data.transform import StreamTransform, Transform, check_transform
from jaxbucket.stream.drift import OnDrift, warn_of_drift
from jaxbucket.stream.iterator import StreamIterator
from jaxbucket.stream.options import (
    Options,
    Phase,
    Plans,
    Policy,
    Samples,
    StreamRun,
    phases_of,
)
from jaxbucket.stream.reader import Arrivals

EpochStream: TypeAlias = Callable[[int, int], grain.IterDataset]
Stream: TypeAlias = grain.IterDataset | EpochStream

# Of the pool: how many more may come before an example is served out of turn.
_WAITS = 16
# Of streams in several processes.
_numbers = itertools.count()


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
    sequences: Sequence[str] | None = None,
    pad_value: PadValue = 0,
    like: Example | None = None,
    seed: int = 0,
    on_drift: OnDrift | None = warn_of_drift,
    transform: Transform | None = None,
) -> StreamDataset:
    """Returns batches of a stream in the shapes of a plan, as a `grain.IterDataset`.

    Where a process has all rows, the bucket of a step is one that the pool fills. Where
    it has a part of them, all processes have one sequence of buckets, and each fills
    its rows from its own stream: they are in the same bucket at every step. A process
    whose stream is over gives empty rows. Those that are given as `processes` tell one
    another where their streams end, and end behind the same step, when all examples are
    given. Without, there is no end but `num_steps`.

    Example:
      >>> import grain, jaxbucket as jb
      >>> source = [{"tokens": [7] * n} for n in (3, 1, 4, 2)]
      >>> dataset = grain.MapDataset.source(source).to_iter_dataset()
      >>> lengths = jb.stream.sample_lengths(dataset, 100)
      >>> plan = jb.plan_buckets(lengths, max_tokens=8, num_buckets=2)
      >>> batches = stream_batches(dataset, plan, pool_size=4)
      >>> [batch.bucket for batch in batches]
      [Bucket(batch_size=2, seq_len=3), Bucket(batch_size=2, seq_len=4)]

    Args:
      dataset: examples, dicts of arrays. Several processes have different ones, each
        its own, but for those that hold the same rows. Or a function `(epoch, seed) ->
        dataset`, with a seed of 32 bits for each epoch, derived from `seed`.
      plan: the shapes. Or a dict `{first step: plan}`, the first of them step 0, all
        of the same longest T and policy for longer examples.
      pool_size: examples that wait in this process; a few times the largest B. It is
        what bounds memory and the size of a checkpoint.
      policy: "closest" gives batches with the least padding, "first" what came first:
        the bucket of the oldest example. Of packed rows, what they are filled with: the
        longest that fits, or the oldest. Several processes have no choice of buckets:
        their padded rows are the same by both.
      lengths: those the plan was made for, `[N]` integers, the same in all processes:
        from them comes the sequence of buckets. Needed where there are several. Or a
        dict, as for `plan`.
      shard: the rows of this process, from `local_rows(mesh)`; by default all.
      processes: those that go through their streams together, from `Processes`. In all
        of them the same streams are made, in the same order, and read as often.
      accumulate: micro-batches of a step, which is a tuple of batches then.
      group: whether they have the "same" bucket or are "mixed".
      num_steps: where the run ends, counted from step 0; by default with the stream.
        `math.inf` for no end, where `StreamEnd` says when all is given.
      num_epochs: how often the stream is read; None for without end. The pool flows on
        from one epoch to the next.
      pack: whether rows hold several examples.
      max_segments_per_row: the most of them; by default as many as in rows packed of
        `lengths`.
      max_wait: how many later ones may arrive before an example is given out of turn;
        by default 16 times `pool_size`. Then it goes up to the next step that it fits
        into.
      sequences: the features that are padded, by default all with a leading axis.
      pad_value: what fills them behind their end, as in `batch_dataset`.
      like: an example to take features from, where a stream may have none at all; with
        a `transform`, as that returns it.
      seed: what seeds of epochs are derived from, and where the sequence of buckets
        begins.
      on_drift: called with a `Drift` when lengths are no longer what the plan was made
        for; by default it warns. None for nobody.
      transform: `(example, rng) -> example`, random augmentation; it may change the
        length. It gets a copy of the example, arrays, bytes as `[]` of objects:
        `example["audio"].item()`. And a `np.random.Generator` that depends on `seed`,
        the epoch, the place of the example in its stream, and which stream that is:
        the first part of `shard`, and the worker. Other generators are seeded by what
        it draws, `rng.integers(2**63)`, or spawned by it.

    Raises:
      ValueError: for a pool smaller than the rows of a batch, plans that do not go
        together, lengths or `processes` that are missing, or options out of range. And
        from an iterator, for an example that is too long or has no length, or that
        `transform` fails for, with its place in the stream; or where processes do not
        batch alike.
      RuntimeError: from an iterator, where the stream raises; with the place, too.
    """
    _check_stream(dataset)
    pool_size = check_positive("pool_size", pool_size)
    options = Options(
        pool_size=pool_size,
        policy=policy,
        shard=shard or RowShard(),
        accumulate=check_accumulate(accumulate),
        group=group,
        num_steps=_checked_steps(num_steps),
        num_epochs=None
        if num_epochs is None
        else check_positive("num_epochs", num_epochs),
        packs=bool(pack),
        max_wait=_WAITS * pool_size
        if max_wait is None
        else check_positive("max_wait", max_wait),
        sequences=None if sequences is None else tuple(listed_names(sequences)),
        pad_value=check_pad_value(pad_value),
        seed=check_seed(seed),
        transform=check_transform(transform),
    )
    phases = phases_of(plan, lengths, options, max_segments_per_row)
    _check_processes(processes, options, num_steps)
    if processes is not None and processes.count == 1 and options.alone:
        # Nobody to meet.
        processes = None
    return StreamDataset(dataset, phases, options, like, on_drift, processes)


def sample_lengths(
    dataset: Stream,
    num_examples: int,
    *,
    sequences: Sequence[str] | None = None,
    seed: int = 0,
    transform: Transform | None = None,
) -> np.ndarray:
    """Returns the lengths of the first examples of a stream, to make a plan of.

    It reads them once more for this: the stream itself is not advanced.

    Args:
      dataset: as in `stream_batches`, and so are the others.
      num_examples: how many, or as many as there are.

    Returns:
      `[N]` int32.

    Raises:
      ValueError: if there is none, or one has no length.
      RuntimeError: where the stream raises.
    """
    _check_stream(dataset)
    number = check_positive("num_examples", num_examples)

    def open_epoch(epoch: int) -> grain.IterDataset:
        if isinstance(dataset, grain.IterDataset):
            return dataset
        return dataset(epoch, epoch_seed(seed, epoch))

    arrivals = Arrivals(
        open_epoch,
        num_epochs=1,
        max_seq_len=MAX_LENGTH,
        overlong="error",
        sequences=sequences,
        transform=StreamTransform(check_transform(transform), check_seed(seed)),
        every=number + 1,
    )
    found = []
    while len(found) < number and (arrived := arrivals.read()):
        found.append(arrived[0].length)
    arrivals.close()
    return np.array(found, np.int32)


def epoch_seed(seed: int, epoch: int) -> int:
    """Returns the seed of an epoch, of 32 bits: those of Grain have no more.

    The high half of `jaxbucket.base.permutation.fold(seed, epoch)`.
    """
    return fold(check_seed(seed), epoch) >> 32


def _check_stream(dataset: Any) -> None:
    """Raises a ValueError that says how a stream is made of what is none."""
    if isinstance(dataset, grain.IterDataset):
        return
    if isinstance(dataset, grain.MapDataset):
        remedy = "`dataset.to_iter_dataset()`"
    elif isinstance(dataset, grain.DataLoader):
        remedy = (
            "`grain.MapDataset.source(data_source).shuffle(seed).apply(operations)"
            ".to_iter_dataset()`, of what the loader was made of"
        )
    elif callable(dataset):
        return
    else:
        remedy = "`grain.MapDataset.source(examples).to_iter_dataset()`"
    raise ValueError(
        f"`dataset` is a {type(dataset).__name__}, not a `grain.IterDataset`: give "
        f"{remedy}, or a function of (epoch, seed)."
    )


def _checked_steps(num_steps: float | None) -> int | None:
    if num_steps is None or num_steps == math.inf:
        return None
    return check_positive("num_steps", num_steps)


def _check_processes(
    processes: ProcessGroup | None, options: Options, num_steps: float | None
) -> None:
    if processes is not None and not hasattr(processes, "gather"):
        raise ValueError(
            f"`processes={processes!r}` do not meet: give the `Processes` of the run."
        )
    ends = num_steps is None and options.num_epochs is not None
    if ends and processes is None and not options.alone:
        raise ValueError(
            "`processes` are missing: this one has a part of the rows, and would not "
            "hear when the streams of others are over. Give the `Processes` of the "
            "run, or a `num_steps`: `math.inf` where `StreamEnd` ends the loop."
        )


class StreamDataset(grain.IterDataset[Any]):
    """What `stream_batches` returns."""

    def __init__(
        self,
        dataset: Stream,
        phases: tuple[Phase, ...],
        options: Options,
        like: Example | None,
        on_drift: OnDrift | None,
        processes: ProcessGroup | None,
    ):
        super().__init__(dataset if isinstance(dataset, grain.IterDataset) else ())
        self._dataset = dataset
        self._phases = phases
        self._options = options
        self._like = like
        self._on_drift = on_drift
        self._processes = processes
        # By which processes know which of several streams they meet for.
        self._number = None if processes is None else next(_numbers)
        self._readings = itertools.count()
        # Which of the steps are of this worker.
        self._first, self._stride = 0, 1

    def __iter__(self) -> StreamIterator:
        return StreamIterator(
            self._run(), f"stream {self._number}, reading {next(self._readings)}"
        )

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Leaves a worker every so many-th example, and the steps of its batches."""
        self._check_no_worker()
        start, stride = sl.start or 0, sl.step or 1
        self._first += start * self._stride
        self._stride *= stride
        if isinstance(self._dataset, grain.IterDataset):
            _slice(self._dataset, sl, sequential_slice)

    def __getstate__(self) -> object:
        # Grain sends it to its workers.
        self._check_no_worker()
        return super().__getstate__()

    def _check_no_worker(self) -> None:
        if self._processes is not None:
            raise ValueError(
                "`processes` is given, and a worker cannot meet those of others. Let "
                "workers read the stream, `stream.mp_prefetch(...)`, or leave it out "
                "and stop by `StreamEnd`."
            )

    def open_epoch(self, epoch: int) -> grain.IterDataset:
        """Returns the stream of an epoch."""
        if isinstance(self._dataset, grain.IterDataset):
            return self._dataset
        dataset = self._dataset(epoch, epoch_seed(self._options.seed, epoch))
        if self._stride > 1:
            dataset = copy.deepcopy(dataset)
            _slice(dataset, slice(self._first, None, self._stride), False)
        return dataset

    @property
    def plan(self) -> BucketPlan:
        """That of the first step."""
        return self._phases[0].plan

    @property
    def example(self) -> dict[str, np.ndarray]:
        """One as batches have it, transformed: for `batch_specs`.

        It is `like`, or else the first of the stream, which is read once more for this.

        Raises:
          ValueError: if the stream has none and there is no `like`, or `transform`
            fails for it.
          RuntimeError: where the stream raises.
        """
        if self._like is not None:
            return copied(self._like)
        iterator = StreamIterator(self._run(), "")
        try:
            example = iterator.first_example()
        finally:
            iterator.close()
        if example is None:
            raise ValueError(
                "The stream has no example to take features from: give `like=`."
            )
        return copied(example)

    @property
    def max_segments(self) -> int | None:
        """The most examples of a packed row; None where a row has one example."""
        return self._phases[0].max_segments

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits of all that batches depend on, but for the stream itself."""
        return digest(json.dumps(self._run().traits(), sort_keys=True).encode())

    def _run(self) -> StreamRun:
        return StreamRun(
            self.open_epoch,
            self._phases,
            self._options,
            self._like,
            self._on_drift,
            self._processes,
            self._first,
            self._stride,
        )

    def position(self, step: int) -> DataPosition:
        """Returns what processes have to agree on, and what to save beside a state.

        Where in the stream it is, `StreamIterator.state_before(step)` says.
        """
        phase = self._run().phase_at(step)
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
            {**self._run().traits(), "fingerprint": self.fingerprint},
        )


def _slice(dataset: Any, sl: slice, sequential_slice: bool) -> None:
    """What Grain does to the datasets of its workers."""
    if hasattr(dataset, "set_slice"):
        dataset.set_slice(sl, sequential_slice)
        return
    if not dataset.parents:
        raise ValueError(
            f"A {type(dataset).__name__} cannot be shared among workers: it has no "
            "`set_slice`. Load without them, or begin with a `grain.MapDataset`."
        )
    for parent in dataset.parents:
        _slice(parent, sl, sequential_slice)
