"""Remainders: the examples that do not fill the last batch of a bucket.

Bucket k has `n` rows: its own examples, and the examples promoted from other buckets.
Full batches hold `n // B * B` of them. The remainder is promoted as a whole to a bucket
that holds it, is padded to a batch with empty rows, or is dropped from the epoch. With
one length, it can only be promoted to the next bucket. The decision depends
only on the counts, so it is the same in every epoch and on every host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_choice
from jaxbucket.plan.flow.between import search_targets
from jaxbucket.plan.flow.dominance import dominates

Remainder: TypeAlias = Literal["cheapest", "promote", "pad", "drop", "repeat"]


@dataclasses.dataclass(frozen=True)
class RowFlow:
    """The number of rows and batches of each bucket in one epoch.

    Attributes:
      counts: `[K]` int64, examples that `BucketPlan.assign` puts into this bucket.
      carried: `[K]` int64, examples promoted from other buckets.
      batches: `[K]` int64, batches per epoch; the last batch may have empty rows.
      rows: `[K]` int64, rows of these batches that hold an example.
      dropped: `[K]` int64, examples left out of the epoch.
      targets: `[K]` int64, the bucket that the remainder of each bucket is promoted to;
        -1 if there is none, or if it is padded or dropped.
    """

    counts: np.ndarray
    carried: np.ndarray
    batches: np.ndarray
    rows: np.ndarray
    dropped: np.ndarray
    targets: np.ndarray

    @property
    def promoted(self) -> np.ndarray:
        """`[K]` int64, examples promoted to another bucket."""
        return self.counts + self.carried - self.rows - self.dropped

    @property
    def num_batches(self) -> int:
        """The number of batches per epoch, over all buckets."""
        return int(self.batches.sum())


def epoch_flow(
    plan: BucketPlan,
    counts: Sequence[int] | np.ndarray,
    batch_sizes: Sequence[int] | np.ndarray,
    costs: np.ndarray,
    remainder: Remainder = "cheapest",
) -> RowFlow:
    """Returns `flow_remainders` between the buckets of a plan.

    `batch_sizes` are the rows of several batches if these are filled together, and
    `costs` are proportional to the cost of these batches.
    """
    above = dominates(plan.seq_lens) if plan.sequences else None
    return flow_remainders(counts, batch_sizes, costs, remainder, above)


def flow_remainders(
    counts: Sequence[int] | np.ndarray,
    batch_sizes: Sequence[int] | np.ndarray,
    costs: Sequence[float] | np.ndarray,
    policy: Remainder = "cheapest",
    above: np.ndarray | None = None,
) -> RowFlow:
    """Returns the rows and batches of an epoch under a policy for remainders.

    "cheapest" is exact for a chain of buckets, each of which can take the remainder of
    the previous one: it finds the cheapest of all sequences of promote-or-pad decisions
    by dynamic programming. Among the sequences that promote the same number of rows
    from a bucket, only the cheapest can be optimal. There are at most k + 1 such
    numbers after bucket k, so that K buckets need K**2 operations, vectorized over the
    numbers of a bucket. With `above`, it is a search (see `between`), which is exact
    unless thousands of partial choices remain, and never costs more than the chain,
    "pad" or "promote".

    Example: the fifth of 5 examples does not fill B = 4, and is promoted to fill B = 2.
      >>> flow_remainders([5, 1], batch_sizes=[4, 2], costs=[32, 32]).batches
      array([1, 1])

    Example: two buckets of one example each fill a batch of the third.
      >>> above = np.array([[0, 0, 1], [0, 0, 1], [0, 0, 0]], bool)
      >>> flow = flow_remainders([1, 1, 1], [4, 4, 3], [32, 32, 36], above=above)
      >>> flow.targets, flow.batches
      (array([ 2,  2, -1]), array([0, 0, 1]))

    Args:
      counts: `[K]` integers, the number of examples in each bucket.
      batch_sizes: `[K]` integers, the B of each bucket.
      costs: `[K]` numbers, the cost of a batch of each bucket, for example its B * T.
      policy: "cheapest"; "promote" to promote every remainder, to the bucket with the
        cheapest rows if there are several; "pad" to pad every remainder; "drop" to
        leave out every remainder; or "repeat", which costs the same as "cheapest",
        because rows that would be empty repeat examples.
      above: `[K, K]` bool, whether bucket j can take the remainder of bucket k at
        `[k, j]`, only later ones can; None for a chain.
    """
    check_choice("remainder", policy, get_args(Remainder))
    counts, batch_sizes = (np.asarray(x, np.int64) for x in (counts, batch_sizes))
    costs, nowhere = np.asarray(costs), np.full(len(counts), -1)
    if policy in ("pad", "drop"):
        return _flow(counts, batch_sizes, nowhere, drop=policy == "drop")
    if policy == "promote":
        return _flow(counts, batch_sizes, _promoting(batch_sizes, costs, above))
    if above is None:
        return _flow(counts, batch_sizes, _cheapest(counts, batch_sizes, costs))
    known = [nowhere, _promoting(batch_sizes, costs, above)]
    if np.diagonal(above, 1).all():
        known.append(_cheapest(counts, batch_sizes, costs))
    flows = [_flow(counts, batch_sizes, targets) for targets in known]
    limit = min(epoch_cost(flow.batches, costs) for flow in flows)
    found = search_targets(counts, batch_sizes, costs, above, limit)
    if found is not None:
        flows.insert(0, _flow(counts, batch_sizes, found))
    return min(flows, key=lambda flow: epoch_cost(flow.batches, costs))


def _promoting(
    batch_sizes: np.ndarray, costs: np.ndarray, above: np.ndarray | None
) -> np.ndarray:
    """Returns the bucket to which each bucket promotes its remainder, -1 for none."""
    size = len(batch_sizes)
    if above is None:
        return np.append(np.arange(1, size), -1)
    rates = np.where(above, costs.astype(np.float64) / batch_sizes, np.inf)
    return np.where(above.any(axis=1), rates.argmin(axis=1), -1)


def _cheapest(
    counts: np.ndarray, batch_sizes: np.ndarray, costs: np.ndarray
) -> np.ndarray:
    """Returns the targets of the cheapest epoch in a chain of buckets, `[K]`.

    Rows that are carried into a bucket come from a chain of consecutive buckets that
    promote. So the first bucket of the chain determines all choices within it.
    """
    # An upper bound of all sums. If it exceeds 64 bits, Python integers are used.
    bound = (sum(counts.tolist()) + len(counts)) * max(costs.tolist())
    if costs.dtype.kind != "f":
        costs = costs.astype(np.int64 if bound < 2**63 else object)
    # The states after a bucket, one for each possible number of carried rows: this
    # number, the cost so far, and the first bucket of the chain. State 0 carries none.
    carry, cost = np.zeros(1, np.int64), np.zeros(1, costs.dtype)
    start = np.zeros(1, np.int64)
    starts = []
    columns = zip(counts.tolist(), batch_sizes.tolist(), costs.tolist(), strict=True)
    for bucket, (count, batch_size, batch_cost) in enumerate(columns):
        full, rest = np.divmod(count + carry, batch_size)
        padded = cost + (full + (rest > 0)).astype(costs.dtype) * batch_cost
        promoted = cost + full.astype(costs.dtype) * batch_cost
        start[0] = bucket
        best = int(np.argmin(padded))
        starts.append(int(start[best]))
        up = np.flatnonzero(rest)
        if np.any(carry >= batch_size):
            up = _cheapest_of_each(rest[up], promoted[up], up)
        carry = np.append(0, rest[up])
        cost = np.append(padded[best], promoted[up])
        start = np.append(0, start[up])
    targets, bucket = np.arange(1, len(starts) + 1), len(starts) - 1
    while bucket >= 0:
        targets[bucket] = -1
        bucket = starts[bucket] - 1
    return targets


def _cheapest_of_each(
    rest: np.ndarray, cost: np.ndarray, states: np.ndarray
) -> np.ndarray:
    """Returns the cheapest state for each number of carried rows, `rest`.

    They are in the order in which the numbers first occur. Among equally cheap states,
    the first one is returned.
    """
    order = np.argsort(cost, kind="stable")
    order = order[np.argsort(rest[order], kind="stable")]
    starts = np.flatnonzero(np.diff(rest[order], prepend=-1))
    if not len(starts):
        return states
    first = np.minimum.reduceat(order, starts)
    return states[order[starts][np.argsort(first)]]


def epoch_cost(batches: np.ndarray, costs: np.ndarray) -> float:
    """Returns the cost of an epoch of `[K]` batches, exactly if costs are integers."""
    if costs.dtype.kind == "f":
        return (batches * costs).sum().item()
    pairs = zip(batches.tolist(), costs.tolist(), strict=True)
    return sum(number * cost for number, cost in pairs)


def _flow(
    counts: np.ndarray, batch_sizes: np.ndarray, targets: np.ndarray, drop: bool = False
) -> RowFlow:
    """Returns the flow if each remainder goes to its target, or is dropped."""
    columns, carried = [], [0] * len(counts)
    buckets = zip(counts.tolist(), batch_sizes.tolist(), targets.tolist(), strict=True)
    for bucket, (count, batch_size, target) in enumerate(buckets):
        total = count + carried[bucket]
        full, rest = divmod(total, batch_size)
        promoted, dropped = rest * (target >= 0), rest * drop
        if promoted:
            carried[target] += promoted
        lost = promoted + dropped
        target = target if promoted else -1
        columns.append((full + (rest > lost), total - lost, dropped, target))
    return RowFlow(counts, np.array(carried), *np.array(columns, np.int64).T)
