"""What processes tell one another about their streams, every few steps.

While streams last, the bucket of a step follows from `BucketSequence` alone. What
processes exchange is who has come to the end, and what is pending there. As soon as all
have, the cheapest batches that drain all pools are known to every process.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxbucket.base.digest import digest
from jaxbucket.data.example import Example, Features, features_of
from jaxbucket.plan.remainder import filler_bucket, flow_remainders
from jaxbucket.stream.peer_status import PeerStatus, check_same_config
from jaxbucket.stream.phases import Phase
from jaxbucket.stream.pool import Pool
from jaxbucket.stream.run import StreamRun

# The most steps of a round: while all streams last, and when one has ended.
_STEPS, _STEPS_AT_END = 16, 4
# Rounds that the states of earlier steps are in.
_ROUNDS_KEPT = 64


class Round(NamedTuple):
    """Steps whose buckets all processes know."""

    first: int
    end: float  # The step behind the last.
    min_bucket: int  # The shortest bucket of the sequence that is used.
    # (bucket, batches) to serve instead of the sequence, if all streams have ended;
    # empty if nothing is pending in any process.
    drain: list[tuple[int, int]] | None

    @property
    def is_over(self) -> bool:
        return self.drain == []

    def bucket(self, step: int, choice: int, phase: Phase, choices: int) -> int:
        """Returns the bucket of one of the choices of a step."""
        if self.drain is None:
            assert phase.sequence is not None
            index = (step - phase.first_step) * choices + choice
            return phase.sequence.without_shorter(self.min_bucket)[index]
        index = (step - self.first) * choices + choice
        for bucket, batches in self.drain:
            if index < batches:
                return bucket
            index -= batches
        # The other micro-batches of the last step.
        return phase.plan.buckets.index(filler_bucket(phase.plan))


class StreamRounds:
    """The rounds of one iterator.

    Args:
      run: the stream, and the processes that meet; without these there is one round
        without an end.
      name: of the iterator, the same in all processes.
    """

    def __init__(self, run: StreamRun, name: str):
        self._run = run
        self._name = name
        # Processes compare their configs when they begin, or go on from a state.
        self._is_checked = False
        self._rounds: collections.deque[Round] = collections.deque(maxlen=_ROUNDS_KEPT)
        # Those of any process, for one that has no example.
        self.features: Features = {}

    def enter(
        self, step: int, phase: Phase, pool: Pool, ended: bool, template: Example | None
    ) -> Round:
        """Returns the round of a step; waits for all processes where one begins.

        Args:
          step: of the run.
          phase: the plan in force.
          pool: the pending examples of this process.
          ended: whether its stream has ended.
          template: an example of it; None if it has had none.

        Raises:
          ValueError: in all processes, if they do not batch alike.
        """
        if self._run.processes is None:
            return Round(0, math.inf, 0, None)
        last = self._rounds[-1] if self._rounds else None
        is_known = last and (last.first <= step < last.end or last.is_over)
        if last and is_known and self._is_checked:
            return last
        status = self._status(step, phase, pool, ended, template)
        replies = self._run.processes.gather(self._name, status.to_json())
        statuses = [PeerStatus.from_json(text) for text in replies]
        check_same_config(statuses)
        self._is_checked = True
        self.features = next((x.features for x in statuses if x.features), {})
        if not is_known:
            self._rounds.append(self._new_round(step, phase, statuses))
        return self._rounds[-1]

    def _status(
        self, step: int, phase: Phase, pool: Pool, ended: bool, template: Example | None
    ) -> PeerStatus:
        options = self._run.options
        lengths = [example.length for example in pool.pending()]
        return PeerStatus(
            config={
                "step": step,
                "round": self.round_at(step),
                "num_steps": options.num_steps,
                "num_epochs": options.num_epochs,
                **self._run.config(),
            },
            parts=list(options.shard.parts),
            pool_digest=digest(np.array(lengths, "<i8").data),
            ended=ended,
            shortest=pool.bucket_of(min(lengths)) if lengths else len(phase.plan),
            rows_needed=pool.rows_needed(),
            features=features_of(template),
        )

    def _new_round(
        self, step: int, phase: Phase, statuses: Sequence[PeerStatus]
    ) -> Round:
        phase_end, options = self._run.phase_end(step), self._run.options
        min_bucket = min(status.shortest for status in statuses)
        if not all(status.ended for status in statuses):
            # A pool must not run empty before all processes know of the end.
            needed = max(phase.rows) * options.accumulate * (phase.max_segments or 1)
            steps = max(_STEPS_AT_END, min(_STEPS, options.pool_size // needed))
            if any(status.ended for status in statuses):
                steps = _STEPS_AT_END
            return Round(step, min(step + steps, phase_end), min_bucket, None)
        batches = options.micro_batches_per_bucket
        rows = np.array(phase.rows) // len(options.shard.parts) * batches
        counts = cheapest_batches(rows_of_part(statuses), rows, phase.plan.costs)
        # The longest first, because shorter examples fill up their rows.
        drain = [(k, counts[k]) for k in reversed(range(len(rows))) if counts[k]]
        steps = -(-sum(counts) // options.buckets_per_step)
        return Round(step, min(step + steps, phase_end), min_bucket, drain)

    def round_at(self, step: int) -> Round | None:
        """Returns the round that a step is in, unless it is the first of one."""
        return next((x for x in self._rounds if x.first < step < x.end), None)

    def restore(self, step: int, current: Round | None) -> None:
        """Goes to where a state was taken.

        Args:
          step: the next one.
          current: the round that it is in, unless it is the first of one.

        Raises:
          ValueError: if the round has buckets that the plan does not have.
        """
        self._is_checked = False
        self._rounds.clear()
        phase = self._run.phase_at(step)
        # A plan that has been adopted since begins with a round of its own.
        if current is None or current.first < phase.first_step:
            return
        buckets = [current.min_bucket, *(bucket for bucket, _ in current.drain or [])]
        if max(buckets) >= len(phase.plan):
            raise ValueError(
                f"`state` is cut or changed: its round has bucket {max(buckets)} of "
                f"{len(phase.plan)}. Restore an earlier checkpoint."
            )
        end = min(current.end, self._run.phase_end(step))
        self._rounds.append(current._replace(end=end))


def rows_of_part(statuses: Sequence[PeerStatus]) -> np.ndarray:
    """Returns `[K]` rows of each bucket that hold the pending examples of any process.

    Rows are those of a part of the batch. What fits into a bucket fits into longer
    ones, so from each bucket on there are as many rows as any process needs there.

    Example: 3 of the short bucket in one process, 1 of each in another.
      >>> a = PeerStatus({}, [0], "", True, 0, [3, 0], {})
      >>> b = PeerStatus({}, [1], "", True, 0, [1, 1], {})
      >>> rows_of_part([a, b])
      array([2, 1])
    """
    needed = [-(-_from_each_on(x.rows_needed) // len(x.parts)) for x in statuses]
    rows = np.max(needed, axis=0)
    return rows - np.append(rows[1:], 0)


def cheapest_batches(
    counts: np.ndarray, batch_sizes: np.ndarray, costs: np.ndarray
) -> list[int]:
    """Returns `[K]` batches that hold all rows, remainders in longer ones if cheaper.

    Example: 3 of the 5 short ones fill up the longer batch.
      >>> sizes, costs = np.array([2, 4]), np.array([8, 32])
      >>> cheapest_batches(np.array([5, 1]), sizes, costs)
      [1, 1]
    """
    batches = flow_remainders(counts, batch_sizes, costs).batches.copy()
    for k in reversed(range(len(batches))):
        # Rows from each bucket on that are not needed: shorter examples fit, too.
        spare = _from_each_on(batches * batch_sizes) - _from_each_on(counts)
        batches[k] -= min(int(batches[k]), int(spare[: k + 1].min()) // batch_sizes[k])
    return batches.tolist()


def _from_each_on(numbers: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the sum of the numbers from each position on."""
    return np.cumsum(numbers[::-1], dtype=np.int64)[::-1]
