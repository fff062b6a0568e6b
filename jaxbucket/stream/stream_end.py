"""The end of streams in several processes, which all of them see at the same step."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from jaxbucket.base.buckets import Bucket, BucketPlan
from jaxbucket.base.checks import check_integer


class StreamEnd:
    """Tells from the steps of a run when the streams of all processes have ended.

    Any example fits into the longest bucket, so a process with an example left would
    have put it into a step of that bucket. Where such a step has no real token, summed
    over all processes, no process has an example left. All processes have the same sum,
    so they stop after the same step.

    Example:
      >>> plan = BucketPlan((Bucket(4, 8), Bucket(2, 16)), max_tokens=32)
      >>> end = StreamEnd(plan, late=0)
      >>> steps = [(plan.buckets[0], 0), (plan.buckets[1], 7), (plan.buckets[1], 0)]
      >>> [end.reached(bucket, num_tokens) for bucket, num_tokens in steps]
      [False, False, True]

    Args:
      plan: the plan of the stream; any of them if it has several.
      late: how many steps later the number of tokens is read, because reading it waits
        for the step.

    Raises:
      ValueError: if `late` is negative.
    """

    def __init__(self, plan: BucketPlan, late: int = 1):
        self._max_seq_len = plan.max_seq_len
        self._late = check_integer("late", late)
        if self._late < 0:
            raise ValueError(f"`late={late}` must not be negative.")
        self._steps: collections.deque[tuple[bool, Any]] = collections.deque()

    def reached(self, bucket: Bucket | Sequence[Bucket], num_tokens: Any) -> bool:
        """Returns whether the streams had ended, `late` steps before this one.

        Args:
          bucket: the bucket of the global batch; those of all micro-batches if a step
            has several.
          num_tokens: `[]` int, real tokens of the step over all processes: the
            `metrics["num_tokens"]` of a train step.
        """
        buckets = [bucket] if isinstance(bucket, Bucket) else bucket
        has_longest = any(x.seq_len == self._max_seq_len for x in buckets)
        self._steps.append((has_longest, num_tokens))
        if len(self._steps) <= self._late:
            return False
        has_longest, num_tokens = self._steps.popleft()
        return has_longest and int(num_tokens) == 0
