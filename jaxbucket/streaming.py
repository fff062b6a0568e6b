"""A stream of examples, whose lengths nobody knows before, to batches of a plan.

A pool of examples is kept, and every batch is cut from it in one of the plan's shapes.
"""

from __future__ import annotations

import bisect
import collections
import copy
import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import grain
import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base import GROUPS, Batch, Bucket, BucketPlan, Group, RowShard, digest
from jaxbucket.bucket_sequence import BucketSequence, bucket_shares
from jaxbucket.checks import (
    check_accumulate,
    check_choice,
    check_integer,
    check_lengths,
    check_positive,
    check_seed,
)
from jaxbucket.closings import Closings
from jaxbucket.collate import collate_rows
from jaxbucket.drift import DriftWatch, OnDrift, warn_of_drift
from jaxbucket.example import Example, example_length
from jaxbucket.packing import pack as pack_rows
from jaxbucket.permutation import fold
from jaxbucket.position import DataPosition
from jaxbucket.remainder import filler_bucket
from jaxbucket.stats import row_lengths
from jaxbucket.stream_arrivals import Arrival, Arrivals, StreamCounts
from jaxbucket.stream_packing import PackedPool
from jaxbucket.stream_pool import PaddedPool, Pool
from jaxbucket.stream_state import StreamState

Policy: TypeAlias = Literal["closest", "first"]
EpochStream: TypeAlias = Callable[[int, int], grain.IterDataset]
Stream: TypeAlias = grain.IterDataset | EpochStream
Plans: TypeAlias = BucketPlan | Mapping[int, BucketPlan]
Samples: TypeAlias = ArrayLike | Mapping[int, ArrayLike]

POLICIES: tuple[str, ...] = get_args(Policy)
# Of the pool: how many more may come before an example is served out of turn.
_WAITS = 16
# Snapshots of the stream, for as many examples as the pool holds.
_SNAPSHOTS = 8
# Steps later that a number of tokens is looked at: it need not be there at once.
_LATE = 1
# Steps that a loop may load ahead of the one that it saves.
_STEPS_KEPT = 64


def stream_batches(
    dataset: Stream,
    plan: Plans,
    *,
    pool_size: int,
    policy: Policy = "closest",
    lengths: Samples | None = None,
    shard: RowShard | None = None,
    accumulate: int = 1,
    group: Group = "same",
    num_steps: float | None = None,
    num_epochs: int | None = 1,
    pack: bool = False,
    max_segments_per_row: int | None = None,
    max_wait: int | None = None,
    load_ahead: int = 4,
    sequences: Sequence[str] | None = None,
    pad_value: float = 0,
    like: Example | None = None,
    seed: int = 0,
    on_drift: OnDrift | None = warn_of_drift,
) -> StreamDataset:
    """Returns batches of a stream in the shapes of a plan, as a `grain.IterDataset`.

    Where a process has all rows, the bucket of a step is one that the pool fills. Where
    it has a part of them, all processes have one sequence of buckets, and each fills
    its rows from its own stream: they are in the same bucket at every step, and none
    asks another. Then there is no end but `num_steps`: a process whose stream is over
    gives empty rows, and `StreamEnd` says when that is so for all.

    Example:
      >>> import grain, jaxbucket as jb
      >>> source = [{"tokens": [7] * n} for n in (3, 1, 4, 2)]
      >>> dataset = grain.MapDataset.source(source).to_iter_dataset()
      >>> lengths = jb.sample_lengths(dataset, 100)
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
      accumulate: micro-batches of a step, which is a tuple of batches then.
      group: whether they have the "same" bucket or are "mixed".
      num_steps: where the run ends, counted from step 0; by default with the stream.
      num_epochs: how often the stream is read; None for without end. The pool flows on
        from one epoch to the next.
      pack: whether rows hold several examples.
      max_segments_per_row: the most of them; by default as many as in rows packed of
        `lengths`.
      max_wait: how many later ones may arrive before an example is given out of turn;
        by default 16 times `pool_size`. Several processes need none.
      load_ahead: how many steps a loop may load ahead of the one that it tells
        `StreamIterator.tell`; the same in all processes.
      sequences: the features that are padded, by default all with a leading axis.
      pad_value: what fills them behind their end.
      like: an example to take features from, where a stream may have none at all.
      seed: what seeds of epochs are derived from, and where the sequence of buckets
        begins.
      on_drift: called with a `Drift` when lengths are no longer what the plan was made
        for; by default it warns. None for nobody.

    Raises:
      ValueError: for a pool smaller than the rows of a batch, plans that do not go
        together, lengths that are missing, or options out of range. And from an
        iterator, for an example that is too long or has no length, with its place in
        the stream.
      RuntimeError: from an iterator, where the stream raises; with the place, too.
    """
    if not isinstance(dataset, grain.IterDataset) and (
        isinstance(dataset, grain.MapDataset) or not callable(dataset)
    ):
        raise ValueError(
            f"`dataset` is a {type(dataset).__name__}, not a `grain.IterDataset`: give "
            "`dataset.to_iter_dataset()`, or a function of (epoch, seed)."
        )
    options = _Options(
        pool_size=check_positive("pool_size", pool_size),
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
        load_ahead=check_positive("load_ahead", load_ahead),
        sequences=None if sequences is None else tuple(_named(sequences)),
        pad_value=pad_value,
        seed=check_seed(seed),
    )
    phases = _phases(plan, lengths, options, max_segments_per_row)
    return StreamDataset(dataset, phases, options, like, on_drift)


def sample_lengths(
    dataset: Stream,
    num_examples: int,
    *,
    sequences: Sequence[str] | None = None,
    seed: int = 0,
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
    """
    number = check_positive("num_examples", num_examples)
    if not isinstance(dataset, grain.IterDataset):
        dataset = dataset(0, epoch_seed(seed, 0))
    iterator = iter(dataset)
    found = []
    for place, example in enumerate(itertools.islice(iterator, number)):
        try:
            found.append(example_length(example, sequences))
        except ValueError as error:
            raise ValueError(f"Example {place} of the stream: {error}") from None
    iterator.close()
    if not found:
        raise ValueError(
            "`dataset` has no example, of which a plan could be made. Check its source."
        )
    return np.array(found, np.int32)


def epoch_seed(seed: int, epoch: int) -> int:
    """Returns the seed of an epoch, of 32 bits: those of Grain have no more.

    The high half of `jaxbucket.permutation.fold(seed, epoch)`.
    """
    return fold(check_seed(seed), epoch) >> 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """How batches are cut, checked one by one before; and here, together."""

    pool_size: int
    policy: Policy
    shard: RowShard
    accumulate: int
    group: Group
    num_steps: int | None
    num_epochs: int | None
    packs: bool
    max_wait: int
    load_ahead: int
    sequences: tuple[str, ...] | None
    pad_value: float
    seed: int

    def __post_init__(self):
        check_choice("policy", self.policy, POLICIES)
        check_choice("group", self.group, GROUPS)

    @property
    def alone(self) -> bool:
        """Whether this process has all rows."""
        return len(self.shard.parts) == self.shard.num_parts

    @property
    def picks(self) -> int:
        """Buckets of a step."""
        return self.accumulate if self.group == "mixed" else 1

    @property
    def together(self) -> int:
        """Micro-batches of one bucket, that are filled together."""
        return self.accumulate // self.picks

    def traits(self) -> dict[str, Any]:
        """What batches depend on, as plain Python, the same in all processes."""
        return {
            "pool_size": self.pool_size,
            "policy": self.policy,
            "parts": self.shard.num_parts,
            "accumulate": self.accumulate,
            "group": self.group,
            "pack": self.packs,
            "max_wait": self.max_wait,
            "load_ahead": self.load_ahead,
            "sequences": None if self.sequences is None else list(self.sequences),
            "pad_value": self.pad_value,
            "seed": self.seed,
        }


class _Phase(NamedTuple):
    """The plan of some steps.

    Attributes:
      first_step: from which on it is in force.
      plan: the shapes.
      sequence: of buckets, where several processes have it.
      rows: `[K]`, of a batch, in this process.
      max_segments: the most examples of a packed row; None where rows are padded.
      sample: `[N]` lengths that the plan was made for, where they are known.
    """

    first_step: int
    plan: BucketPlan
    sequence: BucketSequence | None
    rows: tuple[int, ...]
    max_segments: int | None
    sample: np.ndarray | None

    @property
    def fingerprint(self) -> str:
        shares = self.sequence.shares if self.sequence else ()
        named = [self.plan.fingerprint, str(self.max_segments), *map(str, shares)]
        return digest("\n".join(named).encode())

    def new_pool(self, policy: Policy) -> Pool:
        if self.max_segments is None:
            return PaddedPool(self.plan)
        return PackedPool(self.plan, self.max_segments, policy == "closest")


def _phases(
    plan: Plans,
    lengths: Samples | None,
    options: _Options,
    max_segments_per_row: int | None,
) -> tuple[_Phase, ...]:
    plans = plan if isinstance(plan, Mapping) else {0: plan}
    for step, one in plans.items():
        check_integer("plan", step)
        if not isinstance(one, BucketPlan):
            raise ValueError(
                f"`plan[{step}]` is a {type(one).__name__}, not a `BucketPlan`: "
                "`plan_buckets` makes one."
            )
    steps = sorted(plans)
    if not steps or steps[0] != 0:
        raise ValueError(
            f"`plan` has first steps {steps}: the first plan is that of step 0."
        )
    first = plans[0]
    for step in steps:
        for name in ("max_seq_len", "overlong"):
            now, before = getattr(plans[step], name), getattr(first, name)
            if now != before:
                raise ValueError(
                    f"`plan[{step}]` has `{name}={now!r}`, the first {before!r}: what "
                    "waits in the pool is cut by it. Plan with the same."
                )
    if isinstance(lengths, Mapping) and sorted(lengths) != steps:
        raise ValueError(
            f"`lengths` are of steps {sorted(lengths)}, `plan` of {steps}. Give those "
            "of each plan, or some for all."
        )
    return tuple(
        _phase(
            step,
            plans[step],
            lengths[step] if isinstance(lengths, Mapping) else lengths,
            options,
            max_segments_per_row,
        )
        for step in steps
    )


def _phase(
    step: int,
    plan: BucketPlan,
    lengths: ArrayLike | None,
    options: _Options,
    max_segments_per_row: int | None,
) -> _Phase:
    shard = options.shard
    rows = tuple(
        shard.part_size(bucket.batch_size) * len(shard.parts) for bucket in plan.buckets
    )
    most = max(rows) * options.together
    if options.pool_size < most:
        of = f" of {options.together} batches" if options.together > 1 else ""
        raise ValueError(
            f"`pool_size={options.pool_size}` is smaller than the {most} rows{of} of "
            f"bucket {plan.buckets[rows.index(max(rows))]}. Keep a few times as many."
        )
    if lengths is None and not options.alone:
        raise ValueError(
            "`lengths` are missing: several processes have one sequence of buckets, "
            "which comes from the lengths that the plan was made for. Give the same "
            "in all of them."
        )
    sample = None
    if lengths is not None:
        sample = plan.check(row_lengths(plan, check_lengths(lengths)))
    max_segments = None
    if options.packs:
        max_segments = _max_segments(plan, sample, max_segments_per_row)
    sequence = None
    if not options.alone:
        assert sample is not None
        shares = bucket_shares(plan, sample, max_segments, options.packs)
        sequence = BucketSequence(shares, fold(options.seed, step))
    return _Phase(step, plan, sequence, rows, max_segments, sample)


def _max_segments(
    plan: BucketPlan, sample: np.ndarray | None, given: int | None
) -> int:
    if given is not None:
        return min(check_positive("max_segments_per_row", given), plan.max_seq_len)
    if sample is None:
        raise ValueError(
            "`max_segments_per_row` is missing: a feature of one number for each "
            "example is `[B, max_segments_per_row]`. Give it, or `lengths`."
        )
    kept = np.minimum(sample[plan.assign(sample) >= 0], plan.max_seq_len)
    return pack_rows(kept, plan.boundaries.tolist()).max_segments


def _checked_steps(num_steps: float | None) -> int | None:
    if num_steps is None or num_steps == math.inf:
        return None
    return check_positive("num_steps", num_steps)


def _named(sequences: Sequence[str]) -> Sequence[str]:
    return [sequences] if isinstance(sequences, str) else sequences


class StreamDataset(grain.IterDataset[Any]):
    """What `stream_batches` returns."""

    def __init__(
        self,
        dataset: Stream,
        phases: tuple[_Phase, ...],
        options: _Options,
        like: Example | None,
        on_drift: OnDrift | None,
    ):
        super().__init__(dataset if isinstance(dataset, grain.IterDataset) else ())
        self._dataset = dataset
        self._phases = phases
        self._options = options
        self._like = like
        self._on_drift = on_drift
        # Which of the steps are of this worker.
        self._first, self._stride = 0, 1

    def __iter__(self) -> StreamIterator:
        return StreamIterator(self)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Leaves a worker every so many-th example, and the steps of its batches."""
        start, stride = sl.start or 0, sl.step or 1
        self._first += start * self._stride
        self._stride *= stride
        if isinstance(self._dataset, grain.IterDataset):
            _slice(self._dataset, sl, sequential_slice)

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
    def max_segments(self) -> int | None:
        """The most examples of a packed row; None where a row has one example."""
        return self._phases[0].max_segments

    def _phase_at(self, step: int) -> _Phase:
        index = bisect.bisect_right(self._phases, step, key=lambda x: x.first_step)
        return self._phases[index - 1]

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits of all that batches depend on, but for the stream itself."""
        return digest(json.dumps(self._traits(), sort_keys=True).encode())

    def _traits(self, before: float = math.inf) -> dict[str, Any]:
        """What batches before a step depend on, as plain Python."""
        plans = [
            f"{phase.fingerprint[:16]} from step {phase.first_step}"
            for phase in self._phases
            if phase.first_step < max(before, 1)
        ]
        return {**self._options.traits(), "plans": ", ".join(plans)}

    def position(self, step: int) -> DataPosition:
        """Returns what processes have to agree on, and what to save beside a state.

        Where in the stream it is, `StreamIterator.state_before(step)` says.
        """
        phase = self._phase_at(step)
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
            {**self._traits(), "fingerprint": self.fingerprint},
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


class _Given(NamedTuple):
    """A step that was given, as far as the state before it needs.

    Attributes:
      step: its number.
      read: examples that were read before.
      arrived: what had arrived before.
      oldest: place of the oldest that waited then, or of the next to arrive.
      longest: of its buckets.
      taken: (place, length) of what it took out of the pool.
    """

    step: int
    read: int
    arrived: int
    oldest: int
    longest: int
    taken: list[tuple[int, int]]


class StreamIterator(grain.DatasetIterator[Any]):
    """Batches of a stream, one step after the other."""

    def __init__(self, dataset: StreamDataset):
        super().__init__()
        self._dataset = dataset
        self._options = dataset._options
        self._step = 0
        self._phase: _Phase | None = None
        self._pool: Pool = dataset._phases[0].new_pool(self._options.policy)
        self._template = dataset._like
        self._given: collections.deque[_Given] = collections.deque()
        self._arrivals = self._new_arrivals()
        self._watch: DriftWatch | None = None
        self._closings = Closings(_LATE, self._options.load_ahead)

    def _new_arrivals(self) -> Arrivals:
        options, plan = self._options, self._dataset.plan
        finite = options.num_epochs is not None
        return Arrivals(
            self._dataset.open_epoch,
            options.num_epochs,
            plan.max_seq_len,
            plan.overlong,
            options.sequences,
            every=max(1, options.pool_size // _SNAPSHOTS),
            may_be_empty=finite and (not options.alone or self._dataset._stride > 1),
        )

    @property
    def counts(self) -> StreamCounts:
        """What has been read of the stream, dropped, truncated and split so far."""
        return dataclasses.replace(self._arrivals.counts)

    def histogram(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the last lengths, `[V]` increasing, and how many are of each.

        Of 16,384 at most, since the plan in force took over or the run was resumed.
        """
        empty = np.zeros(0, np.int64)
        return (empty, empty) if self._watch is None else self._watch.histogram()

    @property
    def ended(self) -> bool:
        """Whether this process's stream is over, and all of it has been given."""
        return self._arrivals.ended and not len(self._pool)

    def __next__(self) -> Any:
        self._assert_not_closed()
        options = self._options
        step = self._dataset._first + self._step * self._dataset._stride
        if step >= (options.num_steps or sys.maxsize):
            raise StopIteration
        phase = self._enter(step)
        before = (self._arrivals.counts.read, self._arrivals.counts.arrived)
        oldest = self._oldest_place()
        taken: list[tuple[int, int]] = []
        batches: list[Batch] = []
        longest = 0
        for pick in range(options.picks):
            self._refill()
            bucket = self._choose(phase, step, pick, bool(taken))
            if bucket is None:
                raise StopIteration
            longest = max(longest, bucket)
            rows = self._pool.take(bucket, phase.rows[bucket] * options.together)
            taken += [(x.place, x.length) for row in rows for x in row]
            batches += self._collate(phase, bucket, rows)
        if self._watch is not None:
            self._watch.step(step, batches, self._arrivals.ended)
        self._remember(_Given(self._step, *before, oldest, longest, taken))
        self._step += 1
        return batches[0] if options.accumulate == 1 else tuple(batches)

    def _enter(self, step: int) -> _Phase:
        """The plan in force, into whose buckets what waits is put."""
        phase = self._dataset._phase_at(step)
        if phase is not self._phase:
            waiting = self._pool.waiting()
            self._pool = phase.new_pool(self._options.policy)
            for arrival in waiting:
                self._pool.put(arrival)
            self._phase = phase
            self._watch = DriftWatch(
                phase.plan, phase.sample, self._dataset._on_drift, self._options.packs
            )
        return phase

    def _refill(self) -> None:
        while len(self._pool) < self._options.pool_size:
            arrived = self._arrivals.read()
            if not arrived:
                return
            self._put(arrived)

    def _put(self, arrived: list[Arrival]) -> None:
        if self._template is None:
            self._template = arrived[0].example
        for arrival in arrived:
            self._pool.put(arrival)
            if self._watch is not None:
                self._watch.arrive(arrival.length)

    def _choose(self, phase: _Phase, step: int, pick: int, begun: bool) -> int | None:
        """The bucket to be filled next; None where the stream is over."""
        options = self._options
        if phase.sequence is not None:
            closed = self._closings.closed(step, phase.first_step)
            sequence = phase.sequence.above(closed)
            return sequence[(step - phase.first_step) * options.picks + pick]
        if not len(self._pool):
            # What is left of a step that has begun is filled up.
            filler = phase.plan.buckets.index(filler_bucket(phase.plan))
            return filler if begun else None
        place, bucket = self._pool.oldest()
        waited = self._arrivals.counts.arrived - place
        if options.policy == "first" or waited > options.max_wait:
            return bucket
        rows = [number * options.together for number in phase.rows]
        return self._pool.closest(rows, self._arrivals.ended)

    def _collate(
        self, phase: _Phase, bucket: int, rows: list[list[Arrival]]
    ) -> list[Batch]:
        number = phase.rows[bucket]
        shape = Bucket(number, phase.plan.buckets[bucket].seq_len)
        examples: list[Any] = [[x.example for x in row] for row in rows]
        if phase.max_segments is None:
            examples = [row[0] for row in examples]
        parts = range(self._options.together)
        every = [examples[i * number : (i + 1) * number] for i in parts]
        collate = functools.partial(
            collate_rows,
            bucket=shape,
            like=self._like(),
            sequences=self._options.sequences,
            pad_value=self._options.pad_value,
        )
        try:
            return [collate(x, max_segments=phase.max_segments) for x in every]
        except ValueError:
            # One by one, to find which of them it is.
            for arrival in (x for row in rows for x in row):
                try:
                    collate([arrival.example])
                except ValueError as error:
                    raise ValueError(f"{arrival.origin}: {error}") from None
            raise

    def _like(self) -> Example:
        """What features all batches have, also one without an example."""
        if self._template is None:
            self._template = self._arrivals.first_example()
        if self._template is None:
            raise ValueError(
                "The stream of this process has no example, so that the features of "
                "its empty rows are not known. Give it `like=`, an example of the "
                "others."
            )
        return self._template

    # The end

    def tell(self, step: int, num_tokens: Any) -> bool:
        """Takes what a step had; returns whether the streams of all processes are over.

        A bucket that had no token is left out for a while, so that the end comes
        soon. All processes have to tell every step, in order: they see the
        same number, and do the same.

        Args:
          step: the one that has just been done, from 0.
          num_tokens: `[]` int, its real tokens over all processes: the
            `metrics["num_tokens"]` of `data_parallel`. It is looked at one step later.

        Raises:
          ValueError: if this process has all rows, or more steps than `load_ahead`
            have been loaded.
        """
        given = next((x for x in self._given if x.step == step), None)
        if given is None or self._options.alone:
            raise ValueError(
                f"`step={step}` cannot be told: "
                + (
                    "this process has all rows, and its iterator ends by itself."
                    if self._options.alone
                    else "it is none of the last that were given."
                )
            )
        phase = self._dataset._phase_at(step)
        bucket = None if given.longest == len(phase.plan) - 1 else given.longest
        before = self._closings.next_change
        over = self._closings.tell(step, bucket, num_tokens)
        change = self._closings.next_change
        if change is not None and change != before and change < self._step:
            raise ValueError(
                f"`load_ahead={self._options.load_ahead}`: step {self._step - 1} was "
                f"loaded before step {step} was told. Load fewer steps ahead, or raise "
                "it in all processes."
            )
        return over

    # Checkpoints

    def _oldest_place(self) -> int:
        return self._pool.oldest()[0] if len(self._pool) else self._arrived

    @property
    def _arrived(self) -> int:
        return self._arrivals.counts.arrived

    def _remember(self, given: _Given) -> None:
        self._given.append(given)
        if len(self._given) > _STEPS_KEPT:
            self._given.popleft()
        self._arrivals.forget(self._given[0].oldest, self._given[0].read)

    def get_state(self) -> dict[str, Any]:
        """Returns where in the stream it is, as plain Python for JSON.

        It holds no example, but the numbers of those that wait: about `pool_size`
        integers, and one state of the stream's own.
        """
        return self.state_before(self._step)

    def state_before(self, step: int) -> dict[str, Any]:
        """Returns the state in which this step is the next, of the last 64.

        So a loop that loads ahead saves the state of the step that it has come to.

        Raises:
          ValueError: if it is none of the last, or has not been given yet.
        """
        counts = self._arrivals.counts
        read, arrived = counts.read, counts.arrived
        pairs = [(x.place, x.length) for x in self._pool.waiting()]
        given = [x for x in self._given if x.step >= step]
        if step != self._step and not (given and given[0].step == step):
            kept = self._given[0].step if self._given else self._step
            raise ValueError(
                f"`step={step}`: states are kept of steps {kept} to {self._step}. Save "
                "sooner, or load fewer steps ahead."
            )
        if given:
            read, arrived = given[0].read, given[0].arrived
            pairs += [pair for x in given for pair in x.taken]
            pairs = sorted(pair for pair in pairs if pair[0] < arrived)
        places = [place for place, _ in pairs]
        snapshot = self._arrivals.snapshot(min([*places, arrived]), read)
        return StreamState(
            traits=self._state_traits(step),
            step=step,
            read=read,
            places=places,
            next_place=arrived,
            tokens=sum(length for _, length in pairs),
            snapshot=snapshot,
            closings=self._closings.to_text(step),
        ).to_dict()

    def _state_traits(self, step: int) -> dict[str, Any]:
        dataset = self._dataset
        return {
            **dataset._traits(dataset._first + step * dataset._stride),
            "shard": list(self._options.shard.parts),
            "worker": [dataset._first, dataset._stride],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where a state was taken; it reads the pool again.

        Raises:
          ValueError: if the state is none of such an iterator, or of other plans or
            options; or if what is read again is not what was read before.
        """
        found = StreamState.from_dict(state)
        traits = self._state_traits(found.step)
        if not found.read:
            # Grain takes the state that workers begin with before it makes them.
            found.traits["worker"] = traits["worker"]
        found.check_same(traits)
        self._arrivals.close()
        self._arrivals = self._new_arrivals()
        self._arrivals.go_back(found.snapshot)
        self._step = found.step
        self._given.clear()
        # What waits is put into buckets of the plan in force by the next step.
        self._phase, self._watch = None, None
        self._pool = self._dataset._phases[0].new_pool(self._options.policy)
        self._closings = Closings(_LATE, self._options.load_ahead)
        self._closings.from_text(found.closings)
        waiting = set(found.places)
        while self._arrivals.counts.read < found.read:
            arrived = self._arrivals.read()
            if not arrived:
                break
            kept = [arrival for arrival in arrived if arrival.place in waiting]
            if kept:
                self._put(kept)
        tokens = sum(arrival.length for arrival in self._pool.waiting())
        found.check_read(self._arrivals.counts, len(self._pool), tokens)

    def close(self) -> None:
        """Ends what it has begun; nothing can be read from it any more."""
        if not getattr(self, "_closed", True):
            self._arrivals.close()
        super().close()

    def __str__(self) -> str:
        return f"StreamIterator(step={self._step})"
