"""Iterates over the batches of a stream, and returns the state before each step."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import grain
import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.notes import Noting
from jaxbucket.base.position import DataPosition, entry_changes
from jaxbucket.data.collate import collate_rows
from jaxbucket.data.example import Example, example_from_specs
from jaxbucket.stream.drift import DriftMonitor
from jaxbucket.stream.lockstep import Lockstep, Round
from jaxbucket.stream.reader import PooledExample, Snapshot, StreamCounts
from jaxbucket.stream.run import Phase, StreamRun

# The number of steps that a loop may load ahead of the step that it saves.
_STEPS_KEPT = 64
# The keys of a state.
_STATE = {"position", "counts", "pending", "round", "snapshot"}
_REMEDY = (
    "Restore its data, its code and the weights of a mixture, or make it the same "
    "whenever it is read, by seeding all random draws. If a loader shuffles, pass a "
    "function of (epoch, seed) that creates it with this seed; if its state does not "
    "include a buffer of shuffled examples, omit `resume`."
)


class ServedStep(NamedTuple):
    """A step that was served or started, and the counts before it."""

    step: int
    counts: StreamCounts
    num_pending: int
    oldest: int  # Index of the oldest pending example, or of the next to arrive.
    taken: list[int]  # Indices of the examples of the step.


class StreamIterator(grain.DatasetIterator[Batch]):
    """Iterates over the batches of a stream, or tuples of micro-batches."""

    def __init__(self, run: StreamRun, name: str):
        super().__init__()
        self._run = run
        self._lockstep = Lockstep(run, name)
        self._start(0)

    def _start(self, step: int) -> None:
        self._step = step
        # The error of a failed step, until a state is set.
        self._failure: Exception | None = None
        self._template = self._run.examples.like
        self._reader = self._run.new_reader()
        self._served: collections.deque[ServedStep] = collections.deque()
        self._monitor = DriftMonitor(self._run.max_segments is not None)
        # The first step replaces this pool by one for the current plan.
        self._phase: Phase | None = None
        self._pool = self._run.new_pool(self._run.phases[0])

    @property
    def counts(self) -> StreamCounts:
        """The numbers of examples read, dropped, truncated and split so far."""
        return copy.copy(self._reader.counts)

    def recent_lengths(self) -> Any:
        """Returns the lengths of the most recent examples, to plan with them.

        Returns:
          `[N]` int32 for the last 16,384 examples, or fewer, since the start of the
          iterator; or a mapping from each of several sequences to `[N]` int32.
        """
        names = self._run.phases[0].plan.sequences
        columns = np.array(self._monitor.lengths, np.int32)
        columns = columns.reshape(-1, len(names) or 1).T
        return dict(zip(names, columns, strict=True)) if names else columns[0]

    @property
    def ended(self) -> bool:
        """Whether the stream of this process has ended and all of it was served."""
        return self._reader.counts.ended and not len(self._pool)

    def __next__(self) -> Batch:
        self._assert_not_closed()
        if self._failure is not None:
            # The examples of the failed step are in no row, so no step may follow it.
            raise self._failure
        try:
            batches = self._next()
        except Exception as error:
            self._failure = error
            raise
        except BaseException:
            self._failure = RuntimeError(
                f"Step {self._step} was interrupted. To continue, call "
                "`set_state(get_state())` in all processes of the run."
            )
            raise
        if batches is None:
            # The run has ended, so this step was not started.
            self._served.pop()
            raise StopIteration
        return cast(Batch, batches if self._run.accumulate > 1 else batches[0])

    def _next(self) -> tuple[Batch, ...] | None:
        """Returns the micro-batches of the next step; None at the end."""
        run, step = self._run, self._step
        taken: list[int] = []
        # Recorded first, because the state of a failed step is the state before it.
        self._served.append(self._before_step(taken))
        phase = self._enter_phase(step)
        if run.num_steps is not None and step >= run.num_steps:
            return None
        batches: list[Batch] = []
        tokens = 0
        for choice in range(run.buckets_per_step):
            self._refill()
            bucket = self._choose(phase, step, choice, bool(taken))
            if bucket is None:
                return None
            overdue = self._reader.counts.arrived - run.max_wait
            num_rows = phase.rows[bucket] * run.micro_batches_per_bucket
            rows = self._pool.take(bucket, num_rows, overdue)
            taken += [x.index for row in rows for x in row]
            tokens += sum(x.num_tokens for row in rows for x in row)
            batches += self._collate(phase, bucket, rows)
        if not self._reader.counts.ended:
            positions = sum(batch.bucket.num_tokens for batch in batches)
            self._monitor.add_step(step, len(taken), tokens, positions)
        if len(self._served) > _STEPS_KEPT:
            self._served.popleft()
        self._reader.forget(self._served[0].oldest, self._served[0].counts.read)
        self._step += 1
        return tuple(batches)

    def _before_step(self, taken: list[int]) -> ServedStep:
        number, counts = len(self._pool), self.counts
        oldest = self._pool.oldest()[0] if number else counts.arrived
        return ServedStep(self._step, counts, number, oldest, taken)

    def _enter_phase(self, step: int) -> Phase:
        """Returns the current phase, and puts pending examples into its buckets."""
        phase = self._run.phase_at(step)
        if phase is not self._phase:
            pending = self._pool.pending()
            self._pool = self._run.new_pool(phase)
            for example in pending:
                self._pool.put(example)
            self._phase = phase
            self._monitor.start(phase)
        return phase

    def _refill(self) -> None:
        while len(self._pool) < self._run.pool_size:
            examples = self._reader.read()
            if not examples:
                return
            self._put(examples)

    def _put(self, examples: list[PooledExample]) -> None:
        if self._template is None:
            self._template = examples[0].example
        for example in examples:
            self._pool.put(example)
            self._monitor.lengths.append(example.lengths)

    def _choose(
        self, phase: Phase, step: int, choice: int, is_started: bool
    ) -> int | None:
        """Returns the bucket to fill next; None if the stream has ended."""
        run, reader = self._run, self._reader
        current = self._lockstep.enter(step, phase, self._pool, reader, self._template)
        if phase.sequence is not None:
            if current.is_over:
                return None
            return current.bucket(step, choice, phase, run.buckets_per_step)
        if not len(self._pool):
            # The remaining micro-batches of a started step are empty.
            return phase.plan.filler if is_started else None
        index, bucket = self._pool.oldest()
        waited = reader.counts.arrived - index
        if run.policy == "first" or waited > run.max_wait:
            return bucket
        rows = [number * run.micro_batches_per_bucket for number in phase.rows]
        return self._pool.closest(rows, reader.counts.ended)

    def _collate(
        self, phase: Phase, bucket: int, rows: list[list[PooledExample]]
    ) -> list[Batch]:
        """Returns the micro-batches of rows, in the rows of one bucket."""
        num_rows, run = phase.rows[bucket], self._run
        examples: list[Any] = [[x.example for x in row] for row in rows]
        if run.max_segments is None:
            examples = [row[0] for row in examples]
        collate = functools.partial(
            collate_rows,
            bucket=Bucket(num_rows, phase.plan.buckets[bucket].seq_len),
            like=self._feature_template(),
            sequences=run.examples.sequences,
            pad_value=run.examples.pad_value,
            max_segments=run.max_segments,
        )
        starts = range(0, num_rows * run.micro_batches_per_bucket, num_rows)
        origins = [[(x.epoch, x.epoch_index) for x in row] for row in rows]
        with Noting(f"The examples (epoch, index) of the rows are {origins}."):
            return [collate(examples[start : start + num_rows]) for start in starts]

    def _feature_template(self) -> Example:
        """Returns an example with the features of all batches, including empty ones."""
        if self._template is None:
            of_others = example_from_specs(self._lockstep.features)
            self._template = self._reader.first_example(of_others)
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
        if self._failure is not None and not self._served:
            # The last state was rejected, as opposed to a step that failed.
            raise self._failure
        later = [x for x in self._served if x.step >= step]
        if step != self._step and (not later or later[0].step != step):
            first = self._served[0].step if self._served else self._step
            raise ValueError(
                f"`step={step}` has no state: only those of steps {first} to "
                f"{self._step} are available. Save earlier, or load fewer steps ahead."
            )
        before = later[0] if later else self._before_step([])
        pending = [example.index for example in self._pool.pending()]
        pending += [index for x in later for index in x.taken]
        pending = sorted(index for index in pending if index < before.counts.arrived)
        if len(pending) != before.num_pending:
            raise RuntimeError(
                f"Step {self._step} was interrupted while examples were moved from the "
                "pool into rows. Resume from a state that was saved earlier."
            )
        offsets = (before.counts.arrived - index for index in pending)
        snapshot = self._reader.snapshot(before.oldest, before.counts.read)
        read = dataclasses.asdict(snapshot.counts)
        # The states of all steps have the same structure, so those parts whose
        # structure may differ are strings.
        return {
            "position": json.dumps(self._position(step, before.counts).to_dict()),
            "counts": dataclasses.asdict(before.counts),
            "pending": " ".join(map(str, offsets)),
            "round": json.dumps(self._lockstep.round_at(step)),
            "snapshot": {**snapshot._asdict(), "counts": read},
        }

    def _position(self, step: int, counts: StreamCounts) -> DataPosition:
        """Returns what the state before a step depends on."""
        # Only batches after the end of the stream depend on the number of epochs.
        num_epochs = self._run.examples.num_epochs if counts.ended else 0
        parts = list(self._run.shard.parts)
        return self._run.position(step, parts_here=parts, num_epochs=num_epochs)

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state, and reads its pending examples again.

        All processes of a run must do this before the next step.

        Args:
          state: a state that `get_state` or `state_before` returned, for the same
            stream and options.

        Raises:
          ValueError: if `state` is not such a state, plans or options differ from the
            saved ones, or the stream no longer yields the same examples.
          Exception: any error of the stream.
        """
        if not isinstance(state, Mapping) or state.keys() != _STATE:
            raise ValueError(
                "`state` is not the state of a stream of batches. Pass the result of "
                "`get_state()` or `state_before(step)` of its iterator."
            )
        counts, snapshot = StreamCounts(**state["counts"]), state["snapshot"]
        snapshot = Snapshot(
            **{**snapshot, "counts": StreamCounts(**snapshot["counts"])}
        )
        pending = {counts.arrived - int(x) for x in state["pending"].split()}
        current = json.loads(state["round"])
        position = DataPosition.from_dict(json.loads(state["position"]))
        step = position.step
        position.check_same(self._position(step, counts))
        self._reader.close()
        self._start(step)
        # This error applies until the state has been restored completely.
        self._failure = ValueError(
            "The last state that was set was rejected, so the iterator has no valid "
            "state. Call `set_state` with a saved state."
        )
        self._reader.restore(snapshot)
        current = None if current is None else Round(*current)
        self._lockstep.restore(step, current)
        while self._reader.counts.read < counts.read:
            examples = self._reader.read()
            if not examples:
                break
            if found := [x for x in examples if x.index in pending]:
                self._put(found)
        # By itself, the reader finds the end only when it reads on.
        self._reader.counts.ended = counts.ended
        now = dataclasses.asdict(self._reader.counts)
        changes = entry_changes("its", dataclasses.asdict(counts), now).values()
        if changes or len(self._pool) != len(pending):
            which = ", ".join(changes) or "an example is missing"
            raise ValueError(f"The stream has changed: {which}. {_REMEDY}")
        self._failure = None

    def close(self) -> None:
        """Closes the iterator of the stream; no batch can be read afterwards."""
        if not getattr(self, "_closed", True):
            self._reader.close()
        super().close()

    def __str__(self) -> str:
        return f"StreamIterator(step={self._step})"
