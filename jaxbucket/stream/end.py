"""The end of streams in several processes, which all of them see at the same step."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from jaxbucket.base.buckets import Bucket, BucketPlan
from jaxbucket.base.checks import check_integer


class StreamEnd:
    """Tells from the steps of a run when the streams of all processes are over.

    Any example fits into the longest bucket. A process that had one left would have
    put it into a step of that bucket; so where such a step had no real token, over all
    processes, none has any. The number of tokens is that of the whole step, which
    all processes have alike: they stop after the same one.

    Example:
      >>> plan = BucketPlan((Bucket(4, 8), Bucket(2, 16)), max_tokens=32)
      >>> end = StreamEnd(plan, late=0)
      >>> steps = [(plan.buckets[0], 0), (plan.buckets[1], 7), (plan.buckets[1], 0)]
      >>> [end.reached(bucket, num_tokens) for bucket, num_tokens in steps]
      [False, False, True]

    Args:
      plan: of the stream; where it has several, any of them.
      late: how many steps later it looks at their number of tokens: looking at those
        of a step waits for it.

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
        """Returns whether the streams were over, `late` steps before this one.

        Args:
          bucket: of the global batch; of a step of micro-batches, theirs.
          num_tokens: `[]` int, real tokens of the step over all processes: the
            `metrics["num_tokens"]` of `data_parallel`.
        """
        buckets = [bucket] if isinstance(bucket, Bucket) else bucket
        longest = any(each.seq_len == self._max_seq_len for each in buckets)
        self._steps.append((longest, num_tokens))
        if len(self._steps) <= self._late:
            return False
        longest, num_tokens = self._steps.popleft()
        return longest and int(num_tokens) == 0
