"""Iterates over the batches of a stream, and returns the state before each step."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from typing import Any, NamedTuple, cast

import grain
import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.data.collate import collate_rows
from jaxbucket.data.example import Example, example_from_specs, feature_specs
from jaxbucket.plan.flow.remainder import filler_bucket
from jaxbucket.stream.drift import DriftMonitor
from jaxbucket.stream.phases import Phase
from jaxbucket.stream.reader import PooledExample, StreamCounts
from jaxbucket.stream.rounds import StreamRounds
from jaxbucket.stream.run import StreamRun
from jaxbucket.stream.state import StreamState, check_not_rejected, num_tokens

# The number of steps that a loop may load ahead of the step that it saves.
_STEPS_KEPT = 64


class ServedStep(NamedTuple):
    """A step that was served or started, and the counts before it."""

    step: int  # The step of this worker.
    read: int
    arrived: int
    checksum: int
    ended: bool
    num_pending: int
    oldest: int  # Index of the oldest pending example, or of the next to arrive.
    taken: list[PooledExample]  # The examples of the step, without arrays.


class StreamIterator(grain.DatasetIterator[Batch]):
    """Iterates over the batches of a stream, or tuples of micro-batches."""

    def __init__(self, run: StreamRun, name: str):
        super().__init__()
        self._run = run
        self._options = run.options
        self._rounds = StreamRounds(run, name)
        self._failure: Exception | None = None
        # False from a rejected state until a valid one is set.
        self._is_valid = True
        self._start(0, run.like)

    def _start(self, step: int, template: Example | None) -> None:
        self._step = step
        self._template = template
        self._reader = self._run.new_reader()
        self._served: collections.deque[ServedStep] = collections.deque()
        # The first step replaces this pool by one for the current plan.
        self._phase: Phase | None = None
        self._monitor: DriftMonitor | None = None
        self._pool = self._run.phases[0].new_pool(self._options.policy)

    @property
    def counts(self) -> StreamCounts:
        """The numbers of examples read, dropped, truncated and split so far."""
        return dataclasses.replace(self._reader.counts)

    def histogram(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the histogram of the most recent lengths.

        It counts at most 16,384 examples, starting when the current plan took effect or
        the run was resumed.

        Returns:
          `[V]` lengths, increasing, and the `[V]` numbers of examples with each length.
          With several sequences, the lengths are `[V, Q]`, with a column for each in
          the order of their names.
        """
        if self._monitor is not None:
            return self._monitor.histogram()
        names = self._run.phases[0].plan.sequences
        counts = np.zeros(0, np.int64)
        lengths = np.zeros((0, len(names)), np.int64) if names else counts
        return lengths, counts

    @property
    def ended(self) -> bool:
        """Whether the stream of this process has ended and all of it was served."""
        return self._reader.ended and not len(self._pool)

    def __next__(self) -> Batch:
        self._assert_not_closed()
        if self._failure is not None:
            # The examples of the failed step are in no row, so no step may follow it.
            raise self._failure
        try:
            batches = self._next()
        except StopIteration as error:
            self._failure = RuntimeError(
                f"A function called in step {self._step} raised StopIteration."
            )
            raise self._failure from error
        except Exception as error:
            self._failure = error
            raise
        except BaseException:
            self._failure = RuntimeError(
                f"Step {self._step} was interrupted. To continue, call "
                "`set_state(get_state())`, or set an earlier state, in all processes "
                "of the run."
            )
            raise
        if batches is None:
            # The run has ended, so this step was not started.
            self._served.pop()
            raise StopIteration
        return cast(Batch, batches if self._options.accumulate > 1 else batches[0])

    def _next(self) -> tuple[Batch, ...] | None:
        """Returns the micro-batches of the next step; None at the end."""
        options = self._options
        step = self._run.global_step(self._step)
        taken: list[PooledExample] = []
        # Recorded first, because the state of a failed step is the state before it.
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
        reader, number = self._reader, len(self._pool)
        arrived = reader.counts.arrived
        return ServedStep(
            step=self._step,
            read=reader.counts.read,
            arrived=arrived,
            checksum=reader.checksum,
            ended=reader.ended,
            num_pending=number,
            oldest=self._pool.oldest()[0] if number else arrived,
            taken=taken,
        )

    def _enter_phase(self, step: int) -> Phase:
        """Returns the current phase, and puts pending examples into its buckets."""
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
                self._monitor.add_lengths(example.lengths)

    def _choose(
        self, phase: Phase, step: int, choice: int, is_started: bool
    ) -> int | None:
        """Returns the bucket to fill next; None if the stream has ended."""
        options, reader = self._options, self._reader
        current = self._rounds.enter(step, phase, self._pool, reader, self._template)
        if phase.sequence is not None:
            if current.is_over:
                return None
            return current.bucket(step, choice, phase, options.buckets_per_step)
        if not len(self._pool):
            # The remaining micro-batches of a started step are empty.
            filler = phase.plan.buckets.index(filler_bucket(phase.plan))
            return filler if is_started else None
        index, bucket = self._pool.oldest()
        waited = reader.counts.arrived - index
        if options.policy == "first" or waited > options.max_wait:
            return bucket
        rows = [number * options.micro_batches_per_bucket for number in phase.rows]
        return self._pool.closest(rows, reader.ended)

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
            # Collate the examples one by one to find the one to blame.
            for example in (x for row in rows for x in row):
                try:
                    # `pad_value=0` always fits, so an error is due to the example.
                    collate([example.example], pad_value=0)
                except ValueError as error:
                    raise ValueError(f"{example.origin}: {error}") from None
            raise

    def _feature_template(self) -> Example:
        """Returns an example with the features of all batches, including empty ones."""
        if self._template is None:
            self._template = self._reader.first_example()
        if self._template is None:
            self._template = example_from_specs(self._rounds.features)
        if self._template is None:
            raise ValueError(
                "The stream of this process has no example, so the features of its "
                "empty rows are not known. Pass an example of another process as "
                "`like`."
            )
        return self._template

    def get_state(self) -> dict[str, Any]:
        """Returns the state of the iterator, as plain Python for JSON.

        The state holds the indices of the pending examples, about `pool_size` integers,
        and one state of the stream's own iterator, but no examples.
        """
        return self.state_before(self._step)

    def state_before(self, step: int) -> dict[str, Any]:
        """Returns the state in which `step` is the next step.

        A loop that loads ahead saves this state of the step that it has reached.

        Args:
          step: one of the last 64 steps that were served, or the next step.

        Raises:
          ValueError: if the state before `step` is not available, or the state that was
            set last was rejected.
          RuntimeError: if an interrupt during the last step lost examples.
        """
        check_not_rejected(self._is_valid)
        served = next((x for x in self._served if x.step == step), None)
        if step != self._step and served is None:
            first = self._served[0].step if self._served else self._step
            raise ValueError(
                f"`step={step}` has no state: only those of steps {first} to "
                f"{self._step} are available. Save earlier, or load fewer steps ahead."
            )
        pending = self._pool.pending()
        before = served or self._before_step([])
        if served is not None:
            pending = self._pending_before(served, pending)
        indices = [example.index for example in pending]
        return StreamState(
            config=self._config(step, before.ended),
            step=step,
            read=before.read,
            next_index=before.arrived,
            pending=indices,
            tokens=num_tokens(pending),
            checksum=before.checksum,
            snapshot=self._reader.snapshot(
                min([*indices, before.arrived]), before.read
            ),
            current_round=self._rounds.round_at(step),
            features=feature_specs(self._template if step else self._run.like),
        ).to_dict()

    def _pending_before(
        self, served: ServedStep, pending: list[PooledExample]
    ) -> list[PooledExample]:
        """Returns the examples that were pending before a step.

        Args:
          served: the step.
          pending: the examples that are pending now.
        """
        later = [x for x in self._served if x.step >= served.step]
        pending = [*pending, *(example for x in later for example in x.taken)]
        pending = [example for example in pending if example.index < served.arrived]
        if len(pending) != served.num_pending:
            raise RuntimeError(
                f"Step {self._step} was interrupted while examples were moved from the "
                "pool into rows, so the pending examples are not known. Resume from a "
                "state that was saved earlier."
            )
        return sorted(pending, key=lambda example: example.index)

    def _config(self, step: int, ended: bool) -> dict[str, Any]:
        """Returns what the state before a step of this worker depends on."""
        # Between this step and `step` are only steps of other workers.
        last = self._run.global_step(step - 1)
        return {
            **self._run.config(before=last + 1),
            "shard": list(self._options.shard.parts),
            "worker": [self._run.first_step, self._run.step_stride],
            # Only batches after the end of the stream depend on it.
            "num_epochs": self._options.num_epochs if ended else 0,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state, and reads its pending examples again.

        All processes of a run must do this before the next step.

        Args:
          state: a state that `get_state` or `state_before` returned, for the same
            stream and options.

        Raises:
          ValueError: if `state` is not such a state, plans or options differ from the
            saved ones, or the stream no longer yields the same examples.
          RuntimeError: if the stream cannot be read.
        """
        self.restore(self.checked_state(state))

    def checked_state(self, state: dict[str, Any]) -> StreamState:
        """Returns a state for `restore`, without a change of the iterator.

        Args:
          state: as for `set_state`.

        Raises:
          ValueError: if `state` is not such a state, or plans or options differ from
            the saved ones.
        """
        saved = StreamState.from_dict(state)
        config = self._config(saved.step, saved.ended)
        if not saved.read:
            # Grain's workers start from a state of the dataset before it was sliced.
            saved.config["worker"] = config["worker"]
        saved.check_config(config, self._run.global_step(saved.step))
        current = self._rounds.checked(saved.step, saved.current_round)
        return dataclasses.replace(saved, current_round=current)

    def restore(self, saved: StreamState) -> None:
        """Restores a state from `checked_state`, and reads its pending examples.

        Raises:
          ValueError: if the stream no longer yields the same examples.
          RuntimeError: if the stream cannot be read.
        """
        # This error applies until the state has been restored completely.
        self._failure = ValueError("The last state that was set was rejected.")
        self._is_valid = False
        self._reader.close()
        self._start(saved.step, example_from_specs(saved.features) or self._run.like)
        self._reader.restore(saved.snapshot, saved.read)
        self._rounds.restore(saved.current_round)
        indices = set(saved.pending)
        while self._reader.counts.read < saved.read:
            examples = self._reader.read()
            if not examples:
                break
            if pending := [x for x in examples if x.index in indices]:
                self._put(pending)
        reader = self._reader
        saved.check_read(reader.counts, reader.checksum, self._pool.pending())
        if saved.ended:
            # Otherwise, the reader finds the end only when it reads on.
            reader.ended = True
        self._failure, self._is_valid = None, True

    def close(self) -> None:
        """Closes the iterator of the stream; no batch can be read afterwards."""
        if not getattr(self, "_closed", True):
            self._reader.close()
        super().close()

    def __str__(self) -> str:
        return f"StreamIterator(step={self._step})"
