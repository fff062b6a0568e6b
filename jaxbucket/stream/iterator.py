"""Batches of a stream, one after the other, and where among them a run is."""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
from typing import Any, NamedTuple

import grain
import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.data.collate import collate_rows
from jaxbucket.data.example import Example, example_of, features_of
from jaxbucket.plan.remainder import filler_bucket
from jaxbucket.stream.drift import DriftWatch
from jaxbucket.stream.options import Phase, StreamRun
from jaxbucket.stream.pool import Pool
from jaxbucket.stream.reader import Arrival, Arrivals, StreamCounts
from jaxbucket.stream.rounds import StreamRounds
from jaxbucket.stream.state import StreamState, checksum_of

# Snapshots of the stream, for as many examples as the pool holds.
_SNAPSHOTS = 8
# Steps that a loop may load ahead of the one that it saves.
_STEPS_KEPT = 64


class Given(NamedTuple):
    """A step that was given, as far as the state before it needs.

    Attributes:
      step: its number.
      read: examples that were read before.
      arrived: what had arrived before.
      waiting: how many waited.
      oldest: place of the oldest that waited then, or of the next to arrive.
      taken: (place, length, checksum) of what it took out of the pool.
    """

    step: int
    read: int
    arrived: int
    waiting: int
    oldest: int
    taken: list[tuple[int, int, int]]


class StreamIterator(grain.DatasetIterator[Any]):
    """Batches of a stream, one step after the other."""

    def __init__(self, run: StreamRun, name: str):
        super().__init__()
        self._run = run
        self._options = run.options
        self._step = 0
        self._phase: Phase | None = None
        self._pool: Pool = run.phases[0].new_pool(self._options.policy)
        self._template = run.like
        self._given: collections.deque[Given] = collections.deque()
        self._arrivals = self._new_arrivals()
        self._watch: DriftWatch | None = None
        self._rounds = StreamRounds(run, run.processes, name)
        self._failed: Exception | None = None
        # Whether the pool is what it should be, but for a step that failed.
        self._is_set = True

    def _new_arrivals(self) -> Arrivals:
        options, plan = self._options, self._run.plan
        finite = options.num_epochs is not None
        return Arrivals(
            self._run.open_epoch,
            options.num_epochs,
            plan.max_seq_len,
            plan.overlong,
            options.sequences,
            self._run.transform,
            every=max(1, options.pool_size // _SNAPSHOTS),
            may_be_empty=finite and (not options.alone or self._run.stride > 1),
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
        if self._failed is not None:
            # What it has taken is in no row: nothing may follow as if it were.
            raise self._failed
        try:
            batches = self._next()
        except StopIteration as error:
            self._failed = RuntimeError(
                f"A function that step {self._step} calls raised StopIteration."
            )
            raise self._failed from error
        except Exception as error:
            self._failed = error
            raise
        except BaseException:
            self._failed = RuntimeError(
                f"Step {self._step} was interrupted. Set a state to go on, in all "
                "processes that meet: that of `get_state()`, if it gives one."
            )
            raise
        if batches is None:
            # It has not been begun.
            self._given.pop()
            raise StopIteration
        return batches if self._options.accumulate > 1 else batches[0]

    def _next(self) -> tuple[Batch, ...] | None:
        """The micro-batches of the next step; None at the end."""
        options = self._options
        step = self._run.step(self._step)
        taken: list[tuple[int, int, int]] = []
        # Before anything is taken: where the step fails, this is the state to save.
        self._given.append(self._before(taken))
        phase = self._enter(step)
        if step >= (options.num_steps or sys.maxsize):
            return None
        batches: list[Batch] = []
        for pick in range(options.picks):
            self._refill()
            bucket = self._choose(phase, step, pick, bool(taken))
            if bucket is None:
                return None
            overdue = self._arrived - options.max_wait
            number = phase.rows[bucket] * options.together
            rows = self._pool.take(bucket, number, overdue)
            taken += [(x.place, x.length, x.checksum) for row in rows for x in row]
            batches += self._collate(phase, bucket, rows)
        if self._watch is not None:
            self._watch.step(step, batches, self._arrivals.ended)
        self._forget()
        self._step += 1
        return tuple(batches)

    def _before(self, taken: list[tuple[int, int, int]]) -> Given:
        counts, oldest = self._arrivals.counts, self._oldest_place()
        waiting = len(self._pool)
        return Given(self._step, counts.read, counts.arrived, waiting, oldest, taken)

    def _enter(self, step: int) -> Phase:
        """The plan in force, into whose buckets what waits is put."""
        phase = self._run.phase_at(step)
        if phase is not self._phase:
            waiting = self._pool.waiting()
            self._pool = phase.new_pool(self._options.policy)
            for arrival in waiting:
                self._pool.put(arrival)
            self._phase = phase
            self._watch = DriftWatch(
                *(phase.plan, phase.sample, self._run.on_drift),
                shares=not self._options.alone,
                max_segments=phase.max_segments,
                max_batch_size=self._options.most_rows,
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

    def _choose(self, phase: Phase, step: int, pick: int, begun: bool) -> int | None:
        """The bucket to be filled next; None where the stream is over."""
        options = self._options
        ended, template = self._arrivals.ended, self._template
        now = self._rounds.enter(step, phase, self._pool, ended, template)
        if phase.sequence is not None:
            return None if now.is_over else now.bucket(step, pick, phase, options.picks)
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
        self, phase: Phase, bucket: int, rows: list[list[Arrival]]
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
                    # A `pad_value` that does not fit is not the fault of an example.
                    collate([arrival.example], pad_value=0)
                except ValueError as error:
                    raise ValueError(f"{arrival.origin}: {error}") from None
            raise

    def _like(self) -> Example:
        """What features all batches have, also one without an example."""
        if self._template is None:
            self._template = self.first_example()
        if self._template is None:
            self._template = example_of(self._rounds.features)
        if self._template is None:
            raise ValueError(
                "The stream of this process has no example, so that the features of "
                "its empty rows are not known. Give it `like=`, an example of the "
                "others."
            )
        return self._template

    def first_example(self) -> Example | None:
        """Reads the first example of the stream once more, as it is put into rows.

        Raises:
          RuntimeError: if it cannot be read.
          ValueError: if it cannot be transformed.
        """
        return self._arrivals.first_example()

    # Checkpoints

    def _oldest_place(self) -> int:
        return self._pool.oldest()[0] if len(self._pool) else self._arrived

    @property
    def _arrived(self) -> int:
        return self._arrivals.counts.arrived

    def _forget(self) -> None:
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
          ValueError: if it is none of the last, or has not been given yet; or if the
            state that was set last was refused.
          RuntimeError: if the last step was interrupted where it could not be.
        """
        if not self._is_set:
            raise ValueError(
                "The state that was set last was refused, and there is no other. Set "
                "one that was saved."
            )
        counts = self._arrivals.counts
        read, arrived = counts.read, counts.arrived
        waiting = [(x.place, x.length, x.checksum) for x in self._pool.waiting()]
        given = [x for x in self._given if x.step >= step]
        if step != self._step and not (given and given[0].step == step):
            kept = self._given[0].step if self._given else self._step
            raise ValueError(
                f"`step={step}`: states are kept of steps {kept} to {self._step}. Save "
                "sooner, or load fewer steps ahead."
            )
        if given:
            read, arrived = given[0].read, given[0].arrived
            waiting += [one for x in given for one in x.taken]
            waiting = sorted(one for one in waiting if one[0] < arrived)
            self._check_whole(given[0], len(waiting))
        places = [place for place, _, _ in waiting]
        snapshot = self._arrivals.snapshot(min([*places, arrived]), read)
        return StreamState(
            traits=self._state_traits(step),
            step=step,
            read=read,
            places=places,
            next_place=arrived,
            tokens=sum(length for _, length, _ in waiting),
            checksum=checksum_of((x[1] for x in waiting), (x[2] for x in waiting)),
            snapshot=snapshot,
            inside=self._rounds.inside(step),
            features=features_of(self._template if step else self._run.like),
        ).to_dict()

    def _check_whole(self, given: Given, waiting: int) -> None:
        if waiting != given.waiting:
            raise RuntimeError(
                f"Step {self._step} was interrupted while examples went from the pool "
                "into rows, and which is not known. Go on from a state that was saved "
                "before."
            )

    def _state_traits(self, step: int) -> dict[str, Any]:
        run = self._run
        return {
            **run.traits(run.step(step)),
            "shard": list(self._options.shard.parts),
            "worker": [run.first, run.stride],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where a state was taken; it reads the pool again.

        Processes that meet do so together: at the next step all have to come.

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
        # Until all of it is there.
        self._failed = ValueError("The state that was set last was refused.")
        self._is_set = False
        self._arrivals.close()
        self._arrivals = self._new_arrivals()
        self._arrivals.go_back(found.snapshot)
        self._step = found.step
        self._template = example_of(found.features) or self._run.like
        self._given.clear()
        # What waits is put into buckets of the plan in force by the next step.
        self._phase, self._watch = None, None
        self._pool = self._run.phases[0].new_pool(self._options.policy)
        self._rounds.go_back(found.step, found.inside)
        waiting = set(found.places)
        while self._arrivals.counts.read < found.read:
            arrived = self._arrivals.read()
            if not arrived:
                break
            kept = [arrival for arrival in arrived if arrival.place in waiting]
            if kept:
                self._put(kept)
        again = self._pool.waiting()
        tokens = sum(arrival.length for arrival in again)
        checksum = checksum_of((x.length for x in again), (x.checksum for x in again))
        found.check_read(self._arrivals.counts, len(again), tokens, checksum)
        self._failed, self._is_set = None, True

    def close(self) -> None:
        """Ends what it has begun; nothing can be read from it any more."""
        if not getattr(self, "_closed", True):
            self._arrivals.close()
        super().close()

    def __str__(self) -> str:
        return f"StreamIterator(step={self._step})"
