"""Detects the end of the streams of all processes, at the same step in each."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_integer


class StreamEnd:
    """Detects from the steps of a run that the streams of all processes have ended.

    Any example fits into the longest bucket, so a process with an example left puts it
    into a step of that bucket. If such a step has no real token, summed over all
    processes, no process has an example left. All processes see the same sum, so they
    stop after the same step.

    Example:
      >>> plan = BucketPlan((Bucket(4, 8), Bucket(2, 16)), max_tokens=32)
      >>> end = StreamEnd(plan, delay=0)
      >>> steps = [(plan.buckets[0], 0), (plan.buckets[1], 7), (plan.buckets[1], 0)]
      >>> [end.reached(bucket, num_tokens) for bucket, num_tokens in steps]
      [False, False, True]

    Args:
      plan: the plan of the stream; any of its plans if it has several.
      delay: the number of steps by which reading the number of tokens is delayed,
        because reading it waits until the step has been computed.

    Raises:
      ValueError: if `delay` is negative.
    """

    def __init__(self, plan: BucketPlan, delay: int = 1):
        self._max_seq_len = plan.max_seq_len
        self._delay = check_integer("delay", delay)
        if self._delay < 0:
            raise ValueError(f"`delay={delay}` must not be negative.")
        self._steps: collections.deque[tuple[bool, Any]] = collections.deque()

    def reached(self, bucket: Bucket | Sequence[Bucket], num_tokens: Any) -> bool:
        """Returns whether the streams had ended `delay` steps before this one.

        Args:
          bucket: the bucket of the global batch, or the buckets of all its
            micro-batches.
          num_tokens: `[]` int, the real tokens of the step in all processes: the
            `metrics["num_tokens"]` of a train step.
        """
        buckets = [bucket] if isinstance(bucket, Bucket) else bucket
        has_longest = any(x.seq_len == self._max_seq_len for x in buckets)
        self._steps.append((has_longest, num_tokens))
        if len(self._steps) <= self._delay:
            return False
        has_longest, num_tokens = self._steps.popleft()
        return has_longest and int(num_tokens) == 0
