"""What processes tell one another of their streams, every few steps.

While streams last, their buckets are one sequence that nobody has to ask for. What they
tell is who has come to the end, and what of it still waits. As soon as all have, all
that is left is known to everyone, and so are the cheapest batches that hold it.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxbucket.base.digest import digest
from jaxbucket.base.peers import ProcessGroup
from jaxbucket.data.example import Example, Features, features_of
from jaxbucket.plan.remainder import filler_bucket, flow_remainders
from jaxbucket.stream.options import Phase, StreamRun
from jaxbucket.stream.pool import Pool
from jaxbucket.stream.standing import Standing, check_alike

# Steps of a round, at most: while all streams last, and when one has ended.
_STEPS, _STEPS_AT_END = 16, 4
# Rounds that states of steps before are in.
_ROUNDS_KEPT = 64


class Round(NamedTuple):
    """Steps whose buckets all processes know.

    Attributes:
      first: its first step.
      end: the step behind its last.
      above: of the sequence, only longer buckets than this are given.
      rest: (bucket, batches) that are given in place of the sequence, where all
        streams have ended.
    """

    first: int
    end: float
    above: int
    rest: list[tuple[int, int]] | None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left, in any process."""
        return self.rest == []

    def bucket(self, step: int, pick: int, phase: Phase, picks: int) -> int:
        """Returns which bucket one of the picks of a step is."""
        if self.rest is None:
            assert phase.sequence is not None
            number = (step - phase.first_step) * picks + pick
            return phase.sequence.above(self.above)[number]
        number = (step - self.first) * picks + pick
        for bucket, batches in self.rest:
            if number < batches:
                return bucket
            number -= batches
        # What is left of the last step is filled up.
        return phase.plan.buckets.index(filler_bucket(phase.plan))


class StreamRounds:
    """Round after round, of one iterator.

    Args:
      run: what the iterator goes by.
      processes: those that meet; None for one round without an end.
      name: of the iterator, the same in all.
    """

    def __init__(self, run: StreamRun, processes: ProcessGroup | None, name: str):
        self._run = run
        self._processes = processes
        self._name = name
        # Whoever begins, or goes on from a state, does it where the others do.
        self._has_met = processes is None
        endless = Round(0, math.inf, -1, None)
        self._rounds = collections.deque(
            [] if processes else [endless], maxlen=_ROUNDS_KEPT
        )
        # Of any process: one without an example has those of others.
        self.features: Features = {}

    def enter(
        self, step: int, phase: Phase, pool: Pool, ended: bool, template: Example | None
    ) -> Round:
        """Returns the round of a step.

        Where it begins all processes have to come, and where they go on inside of it.

        Raises:
          ValueError: in all of them, if they do not batch alike.
        """
        last = self._rounds[-1] if self._rounds else None
        is_known = last and (last.first <= step < last.end or last.is_over)
        if last and is_known and self._has_met:
            return last
        assert self._processes is not None
        own = self._own(step, phase, pool, ended, template)
        texts = self._processes.gather(self._name, own.to_text())
        told = [Standing.from_text(text) for text in texts]
        check_alike(told)
        self._has_met = True
        self.features = next((x.features for x in told if x.features), {})
        if not is_known:
            self._rounds.append(self._agreed(step, phase, told))
        return self._rounds[-1]

    def _own(
        self, step: int, phase: Phase, pool: Pool, ended: bool, template: Example | None
    ) -> Standing:
        options = self._run.options
        lengths = [arrival.length for arrival in pool.waiting()]
        return Standing(
            batching={
                "step": step,
                "round": self.inside(step),
                "num_steps": options.num_steps,
                "num_epochs": options.num_epochs,
                **self._run.traits(),
            },
            parts=list(options.shard.parts),
            waiting=digest(np.array(lengths, "<i8").data),
            ended=ended,
            shortest=int(phase.plan.assign([min(lengths)])[0])
            if lengths
            else len(phase.plan),
            left=pool.rows_left(),
            features=features_of(template),
        )

    def _agreed(self, step: int, phase: Phase, told: list[Standing]) -> Round:
        end = self._run.phase_end(step)
        above = min(x.shortest for x in told) - 1
        options = self._run.options
        if not all(x.ended for x in told):
            # No more than a pool is enough for, or it is empty before all know of it.
            most = max(phase.rows) * options.accumulate * (phase.max_segments or 1)
            steps = max(_STEPS_AT_END, min(_STEPS, options.pool_size // most))
            steps = _STEPS_AT_END if any(x.ended for x in told) else steps
            return Round(step, min(step + steps, end), above, None)
        rows = np.array(phase.rows) // len(options.shard.parts) * options.together
        batches = cheapest_batches(rows_of_part(told), rows, phase.plan.costs)
        # Longer ones first: shorter examples fill up their rows.
        rest = [(k, batches[k]) for k in reversed(range(len(rows))) if batches[k]]
        steps = -(-sum(batches for _, batches in rest) // options.picks)
        return Round(step, min(step + steps, end), above, rest)

    def inside(self, step: int) -> Round | None:
        """Returns the round that a step is in, but not the first of; for a state."""
        if self._processes is None:
            return None
        found = (x for x in self._rounds if x.first < step < x.end)
        return next(found, None)

    def go_back(self, step: int, inside: Round | None) -> None:
        """Goes to where a state was taken, before a step.

        Raises:
          ValueError: if its round has buckets that the plan has not.
        """
        if self._processes is None:
            return
        self._has_met = False
        self._rounds.clear()
        phase = self._run.phase_at(step)
        # A plan that has been adopted since begins with a round of its own.
        if inside is None or inside.first < phase.first_step:
            return
        longest = max([inside.above, *(bucket for bucket, _ in inside.rest or [])])
        if longest >= len(phase.plan):
            raise ValueError(
                f"`state` is cut or changed: its round has bucket {longest} of "
                f"{len(phase.plan)}. Restore an earlier checkpoint."
            )
        end = min(inside.end, self._run.phase_end(step))
        self._rounds.append(inside._replace(end=end))


def rows_of_part(told: Sequence[Standing]) -> np.ndarray:
    """Returns `[K]` rows of each bucket, that hold what any process has left.

    Rows are of a part of the batch. What fits into a bucket fits into the longer ones,
    so of all rows from a bucket on there are as many as whoever has most of them needs.

    Example: 3 of the short one in one process, 1 of each in another.
      >>> a = Standing({}, [0], "", True, 0, [3, 0], {})
      >>> b = Standing({}, [1], "", True, 0, [1, 1], {})
      >>> rows_of_part([a, b])
      array([2, 1])
    """
    from_here_on = [
        -(-np.cumsum(x.left[::-1], dtype=np.int64)[::-1] // len(x.parts)) for x in told
    ]
    most = np.max(from_here_on, axis=0)
    return most - np.append(most[1:], 0)


def cheapest_batches(
    counts: np.ndarray, batch_sizes: np.ndarray, costs: np.ndarray
) -> list[int]:
    """Returns `[K]` batches that hold all: those of remainders that flow, if needed.

    Example: the rest of 5 fills up the longer batch, where there is room for 2 more.
      >>> sizes, costs = np.array([2, 4]), np.array([8, 32])
      >>> cheapest_batches(np.array([5, 1]), sizes, costs)
      [1, 1]
    """
    batches = flow_remainders(counts, batch_sizes, costs).batches.copy()
    needed = np.cumsum(counts[::-1])[::-1]
    for k in reversed(range(len(batches))):
        # What rows are too many, from each bucket on; it fits into longer ones, too.
        spare = np.cumsum((batches * batch_sizes)[::-1])[::-1] - needed
        batches[k] -= min(int(batches[k]), int(spare[: k + 1].min()) // batch_sizes[k])
    return batches.tolist()
