"""Detects the end of the streams of all processes, at the same step in each."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_integer
from jaxbucket.base.sizes import Size
from jaxbucket.plan.flow.dominance import is_maximal


class StreamEnd:
    """Detects from the steps of a run that the streams of all processes have ended.

    Any example fits into the longest bucket, so a process with an example left puts it
    into a step of that bucket. If such a step has no real token, summed over all
    processes, no process has an example left. All processes see the same sum, so they
    stop after the same step.

    With several sequences, several buckets may be longest, because none holds all
    examples of another. Then the end is reached once steps without a real token have
    held all that each of them holds, and no other step was between these.

    Example:
      >>> plan = BucketPlan((Bucket(4, 8), Bucket(2, 16)), max_tokens=32)
      >>> end = StreamEnd(plan, delay=0)
      >>> steps = [(plan.buckets[0], 0), (plan.buckets[1], 7), (plan.buckets[1], 0)]
      >>> [end.reached(bucket, num_tokens) for bucket, num_tokens in steps]
      [False, False, True]

    Args:
      plan: the plan of the stream; the first one if it has several, because it decides
        which examples are in the stream.
      delay: the number of steps by which reading the number of tokens is delayed,
        because reading it waits until the step has been computed.

    Raises:
      ValueError: if `delay` is negative.
    """

    def __init__(self, plan: BucketPlan, delay: int = 1):
        longest = np.flatnonzero(is_maximal(plan.seq_lens))
        self._longest = {plan.buckets[k].seq_len for k in longest}
        # Those of them whose examples would have had a step since the last real token.
        self._empty: set[Size] = set()
        self._delay = check_integer("delay", delay)
        if self._delay < 0:
            raise ValueError(f"`delay={delay}` must not be negative.")
        self._steps: collections.deque[tuple[set[Size], Any]] = collections.deque()

    def reached(self, bucket: Bucket | Sequence[Bucket], num_tokens: Any) -> bool:
        """Returns whether the streams had ended `delay` steps before this one.

        Args:
          bucket: the bucket of the global batch, or the buckets of all its
            micro-batches.
          num_tokens: `[]` int, the real tokens of the step in all processes: the
            `metrics["num_tokens"]` of a train step.
        """
        buckets = [bucket] if isinstance(bucket, Bucket) else bucket
        seq_lens = {
            longest
            for longest in self._longest
            if any(Bucket(1, x.seq_len).holds(Bucket(1, longest)) for x in buckets)
        }
        self._steps.append((seq_lens, num_tokens))
        if len(self._steps) <= self._delay:
            return False
        seq_lens, num_tokens = self._steps.popleft()
        self._empty = set() if int(num_tokens) else self._empty | seq_lens
        return self._empty == self._longest
