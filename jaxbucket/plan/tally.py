"""`Tally`: the examples of a plan, counted by bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.length_counts import LengthCounts, chunks
from jaxbucket.base.sizes import Counted, lengths_matrix

# The fields about examples that are left out or changed.
_CHANGES = (
    *("dropped_examples", "truncated_examples", "truncated_tokens"),
    *("split_examples", "chunks"),
)


@dataclasses.dataclass(frozen=True)
class Tally:
    """The examples of a plan, counted by bucket.

    Attributes:
      examples: `[K]` int64, the examples or chunks that are assigned to each bucket.
      tokens: `[K, Q]` int64, the real tokens of each of their sequences.
      changes: the fields of a `Report` about examples that are left out, truncated or
        split.
    """

    examples: np.ndarray
    tokens: np.ndarray
    changes: dict[str, Any]

    @classmethod
    def of(cls, plan: BucketPlan, lengths: Counted) -> Tally:
        """Counts the examples of a plan with any number of examples."""
        examples = np.zeros(len(plan) + 1, np.int64)
        tokens = np.zeros((len(plan) + 1, plan.seq_lens.shape[1]), np.int64)
        changes = dict.fromkeys(_CHANGES, 0)
        if plan.overlong == "split":
            lengths = LengthCounts.of(lengths)
            is_split = lengths.lengths > plan.max_seq_len
            numbers = lengths.counts[is_split]
            pieces = -(-lengths.lengths[is_split] // plan.max_seq_len)
            changes["split_examples"] = int(numbers.sum())
            changes["chunks"] = int((pieces * numbers).sum())
        for rows, numbers in lengths_and_counts(plan, lengths):
            index = plan.assign(rows)
            kept = plan.truncated(rows).reshape(len(rows), -1)
            np.add.at(examples, index + 1, numbers)
            np.add.at(tokens, index + 1, kept * numbers[:, None])
            total = rows.reshape(kept.shape).sum(axis=1)
            cut = np.where(index < 0, 0, total - kept.sum(axis=1))
            changes["dropped_examples"] += int(numbers[index < 0].sum())
            changes["truncated_examples"] += int(numbers[cut > 0].sum())
            changes["truncated_tokens"] += int((cut * numbers).sum())
        return cls(examples[1:], tokens[1:], changes)


def lengths_and_counts(
    plan: BucketPlan, lengths: Counted
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields lengths, `[n]` or `[n, Q]` int64, and the number of examples of each.

    They are those of chunks if the plan splits examples.
    """
    if not plan.sequences:
        counted = LengthCounts.of(lengths)
        if plan.overlong == "split":
            counted = counted.split(plan.max_seq_len)
        plan.check(counted.given)
        yield counted.lengths, counted.counts
        return
    for part in chunks(lengths_matrix(lengths, plan.sequences)):
        yield part.astype(np.int64), np.ones(len(part), np.int64)
