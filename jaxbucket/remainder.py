"""What happens to the examples that do not fill a bucket's last batch.

Bucket k has `n` rows: its own examples and those carried up from bucket k - 1. Full
batches take `n // B * B` of them. The rest, the remainder, either goes up into bucket
k + 1 or stays as one batch with empty rows, whichever makes the whole epoch cheaper.
The choice depends on counts alone, so it is the same in every epoch and on every host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class RowFlow:
    """How many rows and batches every bucket has in one epoch.

    Attributes:
      counts: `[K]` int64, examples whose shortest bucket this is.
      carried: `[K]` int64, rows that come up from the bucket below.
      batches: `[K]` int64, batches of an epoch; the last one may have empty rows.
      rows: `[K]` int64, rows of these batches that hold an example.
    """

    counts: np.ndarray
    carried: np.ndarray
    batches: np.ndarray
    rows: np.ndarray

    @property
    def num_batches(self) -> int:
        """Batches of one epoch, over all buckets."""
        return int(self.batches.sum())


def flow_remainders(
    counts: Sequence[int] | np.ndarray,
    batch_sizes: Sequence[int] | np.ndarray,
    seq_lens: Sequence[int] | np.ndarray,
) -> RowFlow:
    """Returns the cheapest flow of remainders, by padded tokens B * T of an epoch.

    Exact: it compares every sequence of promote-or-pad decisions. Of all sequences
    that carry the same number of rows out of a bucket only the cheapest can be the
    best, and there are at most k + 1 such numbers after bucket k.

    Example: of 5 examples in B = 4 the fifth goes up and fills B = 2.
      >>> flow_remainders([5, 1], batch_sizes=[4, 2], seq_lens=[8, 16]).batches
      array([1, 1])

    Args:
      counts: `[K]` examples of every bucket.
      batch_sizes: `[K]` B of every bucket.
      seq_lens: `[K]` T of every bucket, increasing.
    """
    # rows carried out of the last bucket seen -> (cost so far, promote decisions)
    best: dict[int, tuple[int, tuple[bool, ...]]] = {0: (0, ())}
    shapes = list(zip(counts, batch_sizes, seq_lens, strict=True))
    for bucket, (count, batch_size, seq_len) in enumerate(shapes):
        reached: dict[int, tuple[int, tuple[bool, ...]]] = {}
        for carry, (cost, decisions) in best.items():
            full, rest = divmod(int(count) + carry, int(batch_size))
            tokens = int(batch_size) * int(seq_len)
            options = [(0, cost + (full + (rest > 0)) * tokens, False)]
            if rest and bucket < len(shapes) - 1:
                options.append((rest, cost + full * tokens, True))
            for carry_out, total, promote in options:
                if carry_out not in reached or total < reached[carry_out][0]:
                    reached[carry_out] = (total, (*decisions, promote))
        best = reached
    return _flow(shapes, min(best.values())[1])


def _flow(shapes: list[tuple[int, int, int]], promote: tuple[bool, ...]) -> RowFlow:
    carried, batches, rows, carry = [], [], [], 0
    for (count, batch_size, _), goes_up in zip(shapes, promote, strict=True):
        total = int(count) + carry
        full, rest = divmod(total, int(batch_size))
        carried.append(carry)
        carry = rest if goes_up else 0
        batches.append(full + (rest > 0 and not goes_up))
        rows.append(total - carry)
    counts = [count for count, _, _ in shapes]
    return RowFlow(*(np.array(x, np.int64) for x in (counts, carried, batches, rows)))
