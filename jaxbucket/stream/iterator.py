"""The batches of a stream one after the other, and the state before each of them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import grain
import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.data.collate import collate_rows
from jaxbucket.data.example import Example, example_of, features_of
from jaxbucket.plan.remainder import filler_bucket
from jaxbucket.stream.drift import DriftMonitor
from jaxbucket.stream.phases import Phase
from jaxbucket.stream.reader import PooledExample, StreamCounts
from jaxbucket.stream.rounds import StreamRounds
from jaxbucket.stream.run import StreamRun
from jaxbucket.stream.state import StreamState, summarize

# Steps that a loop may load ahead of the one that it saves.
_STEPS_KEPT = 64


class ServedStep(NamedTuple):
    """A step that was served, or begun, and what was there before it."""

    step: int  # Of this worker.
    read: int
    arrived: int
    num_pending: int
    oldest: int  # Index of the oldest pending example, or of the next to arrive.
    taken: list[PooledExample]  # By the step, without arrays.


class StreamIterator(grain.DatasetIterator[Any]):
    """Iterates over the batches of a stream, or tuples of them for `accumulate`."""

    def __init__(self, run: StreamRun, name: str):
        super().__init__()
        self._run = run
        self._options = run.options
        self._rounds = StreamRounds(run, name)
        self._failure: Exception | None = None
        # Whether the pool is as it should be, except for a step that failed.
        self._is_valid = True
        self._start(0, run.like)

    def _start(self, step: int, template: Example | None) -> None:
        self._step = step
        self._template = template
        self._reader = self._run.new_reader()
        self._served: collections.deque[ServedStep] = collections.deque()
        # The first step puts pending examples into buckets of the plan in force.
        self._phase: Phase | None = None
        self._monitor: DriftMonitor | None = None
        self._pool = self._run.phases[0].new_pool(self._options.policy)

    @property
    def counts(self) -> StreamCounts:
        """How many examples have been read, dropped, truncated and split so far."""
        return dataclasses.replace(self._reader.counts)

    def histogram(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the last lengths that arrived.

        Returns:
          `[V]` lengths, increasing, and `[V]` how many examples have each: of 16,384
          examples at most, since the plan in force took over or the run was resumed.
        """
        empty = np.zeros(0, np.int64)
        return (empty, empty) if self._monitor is None else self._monitor.histogram()

    @property
    def ended(self) -> bool:
        """Whether this process's stream has ended, and all of it was served."""
        return self._reader.ended and not len(self._pool)

    def __next__(self) -> Any:
        self._assert_not_closed()
        if self._failure is not None:
            # The examples that it has taken are in no row, so nothing may follow.
            raise self._failure
        try:
            batches = self._next()
        except StopIteration as error:
            self._failure = RuntimeError(
                f"A function that step {self._step} calls raised StopIteration."
            )
            raise self._failure from error
        except Exception as error:
            self._failure = error
            raise
        except BaseException:
            self._failure = RuntimeError(
                f"Step {self._step} was interrupted. Set a state to go on, in all "
                "processes of the run: that of `get_state()`, if it gives one."
            )
            raise
        if batches is None:
            # It has not been begun.
            self._served.pop()
            raise StopIteration
        return batches if self._options.accumulate > 1 else batches[0]

    def _next(self) -> tuple[Batch, ...] | None:
        """Returns the micro-batches of the next step; None at the end."""
        options = self._options
        step = self._run.global_step(self._step)
        taken: list[PooledExample] = []
        # First of all, because a step that fails is saved as it was before.
        self._served.append(self._before_step(taken))
        phase = self._enter_phase(step)
        if step >= (options.num_steps or math.inf):
            return None
        batches: list[Batch] = []
        for choice in range(options.buckets_per_step):
            self._refill()
            bucket = self._choose(phase, step, choice, bool(taken))
            if bucket is None:
                return None
            overdue = self._reader.counts.arrived - options.max_wait
            num_rows = phase.rows[bucket] * options.micro_batches_per_bucket
            rows = self._pool.take(bucket, num_rows, overdue)
            taken += [x.without_arrays() for row in rows for x in row]
            batches += self._collate(phase, bucket, rows)
        if self._monitor is not None:
            self._monitor.add_step(step, batches, self._reader.ended)
        if len(self._served) > _STEPS_KEPT:
            self._served.popleft()
        self._reader.forget(self._served[0].oldest, self._served[0].read)
        self._step += 1
        return tuple(batches)

    def _before_step(self, taken: list[PooledExample]) -> ServedStep:
        read, arrived = self._reader.counts.read, self._reader.counts.arrived
        oldest = self._pool.oldest()[0] if len(self._pool) else arrived
        return ServedStep(self._step, read, arrived, len(self._pool), oldest, taken)

    def _enter_phase(self, step: int) -> Phase:
        """Returns the plan in force, with pending examples in its buckets."""
        phase = self._run.phase_at(step)
        if phase is not self._phase:
            pending = self._pool.pending()
            self._pool = phase.new_pool(self._options.policy)
            for example in pending:
                self._pool.put(example)
            self._phase = phase
            self._monitor = DriftMonitor(phase, self._options, self._run.on_drift)
        return phase

    def _refill(self) -> None:
        while len(self._pool) < self._options.pool_size:
            examples = self._reader.read()
            if not examples:
                return
            self._put(examples)

    def _put(self, examples: list[PooledExample]) -> None:
        if self._template is None:
            self._template = examples[0].example
        for example in examples:
            self._pool.put(example)
            if self._monitor is not None:
                self._monitor.add_length(example.length)

    def _choose(self, phase: Phase, step: int, choice: int, begun: bool) -> int | None:
        """Returns the bucket to be filled next; None if the stream is over."""
        options, ended = self._options, self._reader.ended
        current = self._rounds.enter(step, phase, self._pool, ended, self._template)
        if phase.sequence is not None:
            if current.is_over:
                return None
            return current.bucket(step, choice, phase, options.buckets_per_step)
        if not len(self._pool):
            # The other micro-batches of a step that has begun are empty.
            filler = phase.plan.buckets.index(filler_bucket(phase.plan))
            return filler if begun else None
        index, bucket = self._pool.oldest()
        waited = self._reader.counts.arrived - index
        if options.policy == "first" or waited > options.max_wait:
            return bucket
        rows = [number * options.micro_batches_per_bucket for number in phase.rows]
        return self._pool.closest(rows, ended)

    def _collate(
        self, phase: Phase, bucket: int, rows: list[list[PooledExample]]
    ) -> list[Batch]:
        num_rows = phase.rows[bucket]
        examples: list[Any] = [[x.example for x in row] for row in rows]
        if phase.max_segments is None:
            examples = [row[0] for row in examples]
        collate = functools.partial(
            collate_rows,
            bucket=Bucket(num_rows, phase.plan.buckets[bucket].seq_len),
            like=self._feature_template(),
            sequences=self._options.sequences,
        )
        full = functools.partial(
            collate, pad_value=self._options.pad_value, max_segments=phase.max_segments
        )
        starts = range(0, num_rows * self._options.micro_batches_per_bucket, num_rows)
        try:
            return [full(examples[start : start + num_rows]) for start in starts]
        except ValueError:
            # One by one, to find which of them it is.
            for example in (x for row in rows for x in row):
                try:
                    # A `pad_value` that does not fit is not the fault of an example.
                    collate([example.example], pad_value=0)
                except ValueError as error:
                    raise ValueError(f"{example.origin}: {error}") from None
            raise

    def _feature_template(self) -> Example:
        """Returns an example with the features of all batches, also empty ones."""
        if self._template is None:
            self._template = self._reader.first_example()
        if self._template is None:
            self._template = example_of(self._rounds.features)
        if self._template is None:
            raise ValueError(
                "The stream of this process has no example, so that the features of "
                "its empty rows are not known. Give it `like=`, an example of the "
                "others."
            )
        return self._template

    def get_state(self) -> dict[str, Any]:
        """Returns where in the stream it is, as plain Python for JSON.

        The state holds no example, only the indices of those that are pending, about
        `pool_size` integers, and one state of the stream's own iterator.
        """
        return self.state_before(self._step)

    def state_before(self, step: int) -> dict[str, Any]:
        """Returns the state in which `step` is the next one.

        A loop that loads ahead so saves the state of the step that it has come to.

        Args:
          step: one of the last 64 that were served, or the next one.

        Raises:
          ValueError: if it is none of these; or if the state that was set last was
            refused.
          RuntimeError: if the last step was interrupted so that examples are lost.
        """
        if not self._is_valid:
            raise ValueError(
                "The state that was set last was refused, and there is no other. Set "
                "one that was saved."
            )
        served = next((x for x in self._served if x.step == step), None)
        if step != self._step and served is None:
            first = self._served[0].step if self._served else self._step
            raise ValueError(
                f"`step={step}`: states are kept of steps {first} to {self._step}. "
                "Save sooner, or load fewer steps ahead."
            )
        counts, pending = self._reader.counts, self._pool.pending()
        read, arrived = counts.read, counts.arrived
        if served is not None:
            read, arrived = served.read, served.arrived
            pending = self._pending_before(served, pending)
        indices = [example.index for example in pending]
        tokens, checksum = summarize(pending)
        return StreamState(
            config=self._config(step),
            step=step,
            read=read,
            next_index=arrived,
            pending=indices,
            tokens=tokens,
            checksum=checksum,
            snapshot=self._reader.snapshot(min([*indices, arrived]), read),
            current_round=self._rounds.round_at(step),
            features=features_of(self._template if step else self._run.like),
        ).to_dict()

    def _pending_before(
        self, served: ServedStep, pending: list[PooledExample]
    ) -> list[PooledExample]:
        """Returns `pending` with what was taken since, without what arrived since."""
        since = [x for x in self._served if x.step >= served.step]
        pending = [*pending, *(example for x in since for example in x.taken)]
        pending = [example for example in pending if example.index < served.arrived]
        if len(pending) != served.num_pending:
            raise RuntimeError(
                f"Step {self._step} was interrupted while examples went from the pool "
                "into rows, and which is not known. Go on from a state that was saved "
                "before."
            )
        return sorted(pending, key=lambda example: example.index)

    def _config(self, step: int) -> dict[str, Any]:
        return {
            **self._run.config(before=self._run.global_step(step)),
            "shard": list(self._options.shard.parts),
            "worker": [self._run.first, self._run.stride],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where a state was taken; reads the pending examples again.

        All processes of a run do so together: they meet at the next step.

        Args:
          state: what `get_state` or `state_before` returned, of an iterator of the
            same stream and options.

        Raises:
          ValueError: if it is something else, or of other plans or options; or if
            what is read again is not what was read before.
          RuntimeError: if the stream cannot be read.
        """
        saved = StreamState.from_dict(state)
        config = self._config(saved.step)
        if not saved.read:
            # Grain takes the state that workers begin with before it makes them.
            saved.config["worker"] = config["worker"]
        saved.check_config(config)
        # Until all of it is there.
        self._failure = ValueError("The state that was set last was refused.")
        self._is_valid = False
        self._reader.close()
        self._start(saved.step, example_of(saved.features) or self._run.like)
        self._reader.restore(saved.snapshot)
        self._rounds.restore(saved.step, saved.current_round)
        indices = set(saved.pending)
        while self._reader.counts.read < saved.read:
            examples = self._reader.read()
            if not examples:
                break
            if pending := [x for x in examples if x.index in indices]:
                self._put(pending)
        saved.check_read(self._reader.counts, self._pool.pending())
        self._failure, self._is_valid = None, True

    def close(self) -> None:
        """Closes the stream's iterator; no batch can be read any more."""
        if not getattr(self, "_closed", True):
            self._reader.close()
        super().close()

    def __str__(self) -> str:
        return f"StreamIterator(step={self._step})"
