"""A stream of examples, whose lengths nobody knows before, to batches of a plan.

Each batch is cut from a pool of examples, in one of the plan's shapes.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

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
from jaxbucket.base.position import DataPosition
from jaxbucket.base.process_group import ProcessGroup
from jaxbucket.data.example import Example, copied, listed_names
from jaxbucket.data.transform import StreamTransform, Transform, check_transform
from jaxbucket.stream.drift import OnDrift, warn_of_drift
from jaxbucket.stream.epochs import Stream, check_stream, open_epoch
from jaxbucket.stream.iterator import StreamIterator
from jaxbucket.stream.options import Options, Policy
from jaxbucket.stream.phases import Plans, Samples, make_phases
from jaxbucket.stream.reader import StreamReader
from jaxbucket.stream.run import StreamRun

# By default an example waits for so many pools of later ones.
_POOLS_TO_WAIT = 16
# The streams that processes of a run make are numbered.
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
    sequences: Sequence[str] | None = None,
    pad_value: PadValue = 0,
    like: Example | None = None,
    seed: int = 0,
    on_drift: OnDrift | None = warn_of_drift,
    transform: Transform | None = None,
) -> StreamDataset:
    """Returns batches of a stream in the shapes of a plan, as a `grain.IterDataset`.

    In one process, the bucket of a step is one that the pool can fill. In several, all
    have one sequence of buckets, and each fills its rows from its own stream: they are
    in the same bucket at every step. A process whose stream has ended gives empty rows.
    With `processes` they tell one another where their streams end, and stop after the
    same step, when all examples have been served. Without, `num_steps` is the only end.

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
      dataset: examples, dicts of arrays; each process has a stream of its own, except
        those with the same rows. Or a function `(epoch, seed) -> dataset`, which gets a
        seed of 32 bits for each epoch, derived from `seed`.
      plan: the shapes. Or a dict `{first step: plan}` with a plan for step 0, all of
        the same longest T and the same policy for longer examples.
      pool_size: examples that are pending in this process; a few times the largest B.
        It bounds memory and the size of a checkpoint.
      policy: "closest" gives batches with the least padding, "first" the bucket of the
        oldest example. Packed rows are filled with the longest example that fits, or
        with the oldest. Several processes have no choice of buckets, so that their
        padded rows are the same by both.
      lengths: `[N]` integers that the plan was made for, equal in all processes: the
        sequence of buckets is derived from them. Needed if there are several processes.
        Or a dict `{first step: lengths}` for the same steps as `plan`.
      shard: the rows of this process, from `local_rows(mesh)`; by default all.
      processes: the `Processes` of the run, if there are several. All of them make the
        same streams, in the same order, and read them equally often.
      accumulate: micro-batches of a step, which is a tuple of batches if it is above 1.
      group: whether micro-batches have the "same" bucket or are "mixed".
      num_steps: where the run ends, counted from step 0; by default with the stream.
        `math.inf` for no end, if `StreamEnd` says when all has been served.
      num_epochs: how often the stream is read; None for without end. The pool flows on
        from one epoch to the next.
      pack: whether rows hold several examples.
      max_segments_per_row: the most examples of a packed row; by default as many as in
        rows packed of `lengths`.
      max_wait: how many later examples may arrive before one is served out of turn, in
        the next step that it fits into; by default 16 times `pool_size`.
      sequences: the features that are padded, by default all with a leading axis.
      pad_value: what fills rows behind their examples: a number for all sequences, or a
        dict `{feature: number}`.
      like: an example to take features from, as `transform` returns it, if a stream may
        have no example at all.
      seed: what the seeds of epochs and the sequence of buckets are derived from.
      on_drift: called with a `Drift` when lengths are no longer what the plan was made
        for; by default it warns. None for no call.
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
        `transform` fails for, with its place in the stream; or if processes do not
        batch alike.
      RuntimeError: from an iterator, if the stream raises; with the place, too.
    """
    check_stream(dataset)
    pool_size = check_positive("pool_size", pool_size)
    if max_wait is None:
        max_wait = _POOLS_TO_WAIT * pool_size
    options = Options(
        pool_size=pool_size,
        policy=policy,
        shard=shard or RowShard(),
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
        sequences=None if sequences is None else tuple(listed_names(sequences)),
        pad_value=check_pad_value(pad_value),
        seed=check_seed(seed),
        transform=check_transform(transform),
    )
    phases = make_phases(plan, lengths, options, max_segments_per_row)
    _check_processes(processes, options, num_steps)
    if processes is not None and processes.count == 1 and options.is_single_process:
        processes = None
    return StreamDataset(StreamRun(dataset, phases, options, like, on_drift, processes))


def _check_processes(
    processes: ProcessGroup | None, options: Options, num_steps: float | None
) -> None:
    if processes is not None and not hasattr(processes, "gather"):
        raise ValueError(
            f"`processes={processes!r}` cannot exchange texts: give the `Processes` of "
            "the run."
        )
    has_end = num_steps is None and options.num_epochs is not None
    if has_end and processes is None and not options.is_single_process:
        raise ValueError(
            "`processes` are missing: this one has a part of the rows, and would not "
            "hear when the streams of others are over. Give the `Processes` of the "
            "run, or a `num_steps`: `math.inf` where `StreamEnd` ends the loop."
        )


def sample_lengths(
    dataset: Stream,
    num_examples: int,
    *,
    sequences: Sequence[str] | None = None,
    seed: int = 0,
    transform: Transform | None = None,
) -> np.ndarray:
    """Returns the lengths of the first examples of a stream, to make a plan of.

    The examples are read once more for this: the stream itself is not advanced.

    Example:
      >>> import grain
      >>> source = [{"tokens": [7] * n} for n in (3, 1, 4, 2)]
      >>> dataset = grain.MapDataset.source(source).to_iter_dataset()
      >>> sample_lengths(dataset, 3)
      array([3, 1, 4], dtype=int32)

    Args:
      dataset: examples, dicts of arrays; or a function `(epoch, seed) -> dataset`, of
        which epoch 0 is read.
      num_examples: how many are read, or as many as there are.
      sequences: the features whose length counts, by default all with a leading axis.
      seed: what the seed of epoch 0 and the draws of `transform` are derived from.
      transform: `(example, rng) -> example`, applied before the length is taken: the
        one that `stream_batches` gets.

    Returns:
      `[N]` int32.

    Raises:
      ValueError: if there is no example, or one has no length.
      RuntimeError: if the stream raises.
    """
    check_stream(dataset)
    num_examples = check_positive("num_examples", num_examples)
    reader = StreamReader(
        open_epoch=functools.partial(open_epoch, dataset, seed=check_seed(seed)),
        num_epochs=1,
        max_seq_len=MAX_LENGTH,
        overlong="error",
        sequences=sequences,
        transform=StreamTransform(check_transform(transform), seed),
        snapshot_every=num_examples + 1,
    )
    lengths = []
    while len(lengths) < num_examples and (examples := reader.read()):
        lengths.append(examples[0].length)
    reader.close()
    return np.array(lengths, np.int32)


class StreamDataset(grain.IterDataset[Any]):
    """The batches of a stream, as `stream_batches` returns them."""

    def __init__(self, run: StreamRun):
        dataset = run.dataset
        super().__init__(dataset if isinstance(dataset, grain.IterDataset) else ())
        self._run = run
        # By these, processes know which of several streams and iterators they meet for.
        self._number = None if run.processes is None else next(_stream_numbers)
        self._num_iterators = 0

    def __iter__(self) -> StreamIterator:
        name = f"stream {self._number}, reading {self._num_iterators}"
        self._num_iterators += 1
        return StreamIterator(self._run, name)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Leaves a worker its share of the examples, and the steps of its batches."""
        self._check_no_worker()
        self._run = self._run.sliced(sl, sequential_slice)

    def __getstate__(self) -> object:
        # Grain pickles it for its workers.
        self._check_no_worker()
        return super().__getstate__()

    def _check_no_worker(self) -> None:
        if self._run.processes is not None:
            raise ValueError(
                "`processes` is given, and a worker cannot meet those of others. Let "
                "workers read the stream, `stream.mp_prefetch(...)`, or leave it out "
                "and stop by `StreamEnd`."
            )

    @property
    def plan(self) -> BucketPlan:
        """The plan of the first step."""
        return self._run.phases[0].plan

    @property
    def max_segments(self) -> int | None:
        """The most examples of a packed row; None if a row has one example."""
        return self._run.phases[0].max_segments

    @property
    def example(self) -> dict[str, np.ndarray]:
        """An example as batches have it, transformed: for `batch_specs`.

        It is `like`, or else the first of the stream, which is read once more for this.

        Raises:
          ValueError: if the stream has none and there is no `like`, or `transform`
            fails for it.
          RuntimeError: if the stream raises.
        """
        example = self._run.like
        if example is None:
            example = self._run.new_reader().first_example()
        if example is None:
            raise ValueError(
                "The stream has no example to take features from: give `like=`."
            )
        return copied(example)

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits of all that batches depend on, except the stream itself."""
        return digest(json.dumps(self._run.config(), sort_keys=True).encode())

    def position(self, step: int) -> DataPosition:
        """Returns what processes have to agree on, and what to save beside a state.

        Where in the stream the run is, `StreamIterator.state_before(step)` says.

        Args:
          step: the next one.
        """
        phase = self._run.phase_at(step)
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
            {**self._run.config(), "fingerprint": self.fingerprint},
        )
