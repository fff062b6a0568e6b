"""Keeps the processes of a run in the same bucket at every step.

A *round* is a range of steps whose buckets all processes know in advance. Until streams
end, these are those of `BucketSequence`. Between rounds, processes exchange whether
their stream has ended and which rows their pending examples need. Once all streams have
ended, every process computes the same cheapest batches that drain all pools.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbucket.base.digest import digest
from jaxbucket.base.position import entry_changes
from jaxbucket.data.example import Example, Features, feature_specs
from jaxbucket.stream.drain import cheapest_batches
from jaxbucket.stream.loader import add_checksum
from jaxbucket.stream.pool import Pool
from jaxbucket.stream.reader import StreamReader
from jaxbucket.stream.run import Phase, StreamRun

# The largest number of steps in a round, before and after the first stream ends.
_STEPS, _STEPS_AT_END = 16, 4
# The number of rounds kept for the states of earlier steps.
_ROUNDS_KEPT = 64
# Fewer different examples may be the same by chance, or may be repeated on purpose.
_MIN_DISTINCT = 4


class PeerStatus(NamedTuple):
    """The status that a process sends to the others at the start of a round."""

    config: dict[str, Any]  # Equal in all processes.
    parts: list[int]  # The parts of the rows that this process has.
    pool_digest: str  # Equal in processes with the same parts.
    ended: bool  # Whether the stream of this process has ended.
    shortest: int  # First bucket with a pending example; K if there is none.
    rows_needed: list[int]  # `[K]` rows that hold the pending examples.
    features: Features  # Empty if no example has arrived.
    arrived: int  # The number of examples that have arrived.
    checksum: int  # Of these examples.
    distinct: int = 0  # Different examples among the pending ones; 0 if not counted.


class Round(NamedTuple):
    """A range of steps whose buckets all processes know."""

    first: int
    end: float  # One past the last step.
    min_bucket: int  # The shortest bucket of the sequence that is used.
    # (bucket, number of batches) pairs that replace the sequence once all streams have
    # ended; empty if no process has a pending example.
    drain: list[tuple[int, int]] | None

    @property
    def is_over(self) -> bool:
        return self.drain == []

    def bucket(self, step: int, choice: int, phase: Phase, choices: int) -> int:
        """Returns the bucket for one of the `choices` of a step."""
        if self.drain is None:
            assert phase.sequence is not None
            index = (step - phase.first_step) * choices + choice
            return phase.sequence.without_shorter(self.min_bucket)[index]
        index = (step - self.first) * choices + choice
        for bucket, batches in self.drain:
            if index < batches:
                return bucket
            index -= batches
        # The remaining micro-batches of the last step are empty.
        return phase.plan.filler


class Lockstep:
    """The rounds of one iterator.

    Args:
      run: the stream and its processes. Without processes there is one endless round.
      name: the name of the iterator, the same in all processes.
    """

    def __init__(self, run: StreamRun, name: str):
        self._run = run
        self._name = name
        # Processes compare their configs at the start and after restoring a state.
        self._is_checked = False
        self._rounds: collections.deque[Round] = collections.deque(maxlen=_ROUNDS_KEPT)
        # The features of any process, for a process without an example.
        self.features: Features = {}

    def enter(
        self,
        step: int,
        phase: Phase,
        pool: Pool,
        reader: StreamReader,
        template: Example | None,
    ) -> Round:
        """Returns the round of a step; waits for all processes if a new one starts.

        Args:
          step, phase: the step and its phase.
          pool, reader: the pending examples of this process, and what reads them.
          template: an example of the stream; None if no example has arrived.
        """
        if not self._run.meets:
            return Round(0, math.inf, 0, None)
        last = self._rounds[-1] if self._rounds else None
        is_known = last and (last.first <= step < last.end or last.is_over)
        if last and is_known and self._is_checked:
            return last
        assert self._run.processes is not None
        status = self._status(step, pool, reader, template)
        text = json.dumps(status._asdict())
        replies = self._run.processes.gather(self._name, text)
        statuses = [PeerStatus(**json.loads(text)) for text in replies]
        _check_peers(statuses)
        self._is_checked = True
        self.features = next((x.features for x in statuses if x.features), {})
        if not is_known:
            self._rounds.append(self._new_round(step, phase, statuses))
        return self._rounds[-1]

    def _status(
        self, step: int, pool: Pool, reader: StreamReader, template: Example | None
    ) -> PeerStatus:
        pending = pool.pending()
        lengths = [example.lengths for example in pending]
        compared = [] if self._is_checked else pending
        return PeerStatus(
            config={
                "step": step,
                "round": self.round_at(step),
                "num_steps": self._run.num_steps,
                "num_epochs": self._run.examples.num_epochs,
                **self._run.config(),
            },
            parts=list(self._run.shard.parts),
            pool_digest=digest(np.array(lengths, "<i8").data),
            ended=reader.counts.ended,
            shortest=pool.first_bucket(),
            rows_needed=pool.rows_needed(),
            features=feature_specs(template),
            arrived=reader.counts.arrived,
            checksum=reader.counts.checksum,
            distinct=len({add_checksum(0, x.example) for x in compared}),
        )

    def _new_round(
        self, step: int, phase: Phase, statuses: Sequence[PeerStatus]
    ) -> Round:
        phase_end, run = self._run.phase_end(step), self._run
        min_bucket = min(status.shortest for status in statuses)
        if not all(status.ended for status in statuses):
            # Short enough that no pool runs empty before all processes know the end.
            needed = max(phase.rows) * run.accumulate * (run.max_segments or 1)
            steps = max(_STEPS_AT_END, min(_STEPS, run.pool_size // needed))
            if any(status.ended for status in statuses):
                steps = _STEPS_AT_END
            return Round(step, min(step + steps, phase_end), min_bucket, None)
        batches = run.micro_batches_per_bucket
        # Devices that share a row count as one part.
        unit = max(map(run.shard.cut, phase.plan.buckets))
        rows = np.array(phase.rows) * unit // len(run.shard.parts) * batches
        needed = [status.rows_needed for status in statuses]
        num_parts = [len(status.parts) // unit for status in statuses]
        counts = cheapest_batches(phase.plan, needed, num_parts, rows)
        # The longest bucket comes first, so that shorter examples can fill its rows.
        # If overdue examples take the rows of others, these need another round.
        drain = [(k, counts[k]) for k in reversed(range(len(rows))) if counts[k]]
        steps = -(-sum(counts) // run.buckets_per_step)
        return Round(step, min(step + steps, phase_end), min_bucket, drain)

    def round_at(self, step: int) -> Round | None:
        """Returns the round of a step; None if the step is the first of a round."""
        return next((x for x in self._rounds if x.first < step < x.end), None)

    def restore(self, step: int, current: Round | None) -> None:
        """Continues at a step.

        Args:
          step: the next step.
          current: the round of the step; None if the step is the first of a round.
        """
        self._is_checked = False
        self._rounds.clear()
        # A plan that was adopted after the state was saved starts a new round.
        if current and current.first >= self._run.phase_at(step).first_step:
            end = min(current.end, self._run.phase_end(step))
            self._rounds.append(current._replace(end=end))


def _check_peers(statuses: Sequence[PeerStatus]) -> None:
    """Raises a ValueError that lists all differences between the processes.

    Processes with different rows must not have read the same examples. But data to
    measure the throughput may consist of a few examples that are repeated.
    """
    differences: list[str] = []
    for first, other, a, b in _pairs(statuses, lambda x: "all"):
        part = f"processes {first} and {other}:"
        differences += entry_changes(part, a.config, b.config).values()
    for first, other, a, b in _pairs(statuses, lambda x: bool(x.features) or None):
        part = f"processes {first} and {other}: feature"
        differences += entry_changes(part, _kinds(a), _kinds(b)).values()
    for first, other, a, b in _pairs(statuses, lambda x: tuple(x.parts)):
        if a.pool_digest != b.pool_digest:
            differences.append(
                f"processes {first} and {other} have the same rows, {a.parts}, but "
                "different streams"
            )
    for first, other, a, b in _pairs(statuses, lambda x: (x.arrived, x.checksum)):
        if a.parts != b.parts and b.distinct >= _MIN_DISTINCT:
            differences.append(
                f"processes {first} and {other} have different rows, but the same "
                f"{a.arrived} examples; give each a part of the stream by `shard=`"
            )
    if differences:
        raise ValueError(
            f"The processes batch differently: {'; '.join(differences)}. Start all of "
            "them with the same plan, lengths, options and step."
        )


def _pairs(
    statuses: Sequence[PeerStatus], key: Callable[[PeerStatus], Any]
) -> Iterator[tuple[int, int, PeerStatus, PeerStatus]]:
    """Yields each process with the first one that has the same key, if it is not None.

    Each pair is the numbers of two processes, and their statuses.
    """
    first_with: dict[Any, int] = {}
    for index, status in enumerate(statuses):
        if (group := key(status)) is not None:
            first = first_with.setdefault(group, index)
            yield first, index, statuses[first], status


def _kinds(status: PeerStatus) -> dict[str, str]:
    """Returns the dtype of each feature, and its shape without sequence axes."""
    kinds, sequences = {}, status.config["sequences"]
    if isinstance(sequences, dict):
        # A feature of several sequences has `[name, axis]` for each axis but the first.
        entries = [entry for names in sequences.values() for entry in names]
        sequences = [x if isinstance(x, str) else x[0] for x in entries]
    for name, (dtype, shape) in sorted(status.features.items()):
        num_axes = 1 if sequences is None else sequences.count(name)
        # The dtype of a string depends on its length.
        dtype = "text" if np.dtype(dtype).kind in "SU" else dtype
        kinds[name] = f"{dtype}{list(shape[num_axes:])}"
    return kinds
