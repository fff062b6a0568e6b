"""Remainders that flow between shapes of several lengths.

With one length, a remainder can only go to the next bucket. With several lengths it can
go to any bucket that dominates its own, so the buckets are a graph. A remainder is
passed on as a whole, and may be part of what its new bucket passes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import get_args

import numpy as np

from jaxbucket.base.checks import check_choice
from jaxbucket.plan.flow.remainder import (
    Remainder,
    RowFlow,
    epoch_cost,
    flow_remainders,
)

# The number of partial choices that are kept after each bucket, times K**2.
_WORK = 1 << 17
# The fractional part of the golden ratio in 64 bits, which spreads hashes evenly.
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
# A choice counts as cheaper only beyond rounding errors.
_SLACK = 1 - 1e-12


@dataclasses.dataclass(frozen=True)
class FlowBetween(RowFlow):
    """The rows and batches of an epoch of buckets with several lengths.

    Attributes:
      exact: whether no other choice of targets is cheaper. False for the policies
        "promote", "pad" and "drop", and if a search was too large to complete.
    """

    exact: bool = False


def flow_remainders_between(
    counts: Sequence[int] | np.ndarray,
    batch_sizes: Sequence[int] | np.ndarray,
    costs: Sequence[float] | np.ndarray,
    dominates: np.ndarray,
    policy: Remainder = "cheapest",
) -> FlowBetween:
    """Returns the rows and batches of an epoch under a policy for remainders.

    "cheapest" keeps partial choices of targets, bucket by bucket, and only discards
    those that cannot be completed to a cheaper epoch. This is exact unless thousands
    of them remain. Then the least promising are discarded as well, but the cost never
    exceeds that of "pad", of "promote", or of `flow_remainders` if each bucket
    dominates the previous one.

    Example: two buckets of one example each fill a batch of the third.
      >>> above = np.array([[0, 0, 1], [0, 0, 1], [0, 0, 0]], bool)
      >>> flow = flow_remainders_between([1, 1, 1], [4, 4, 3], [32, 32, 36], above)
      >>> flow.targets, flow.batches
      (array([ 2,  2, -1]), array([0, 0, 1]))

    Args:
      counts: `[K]` integers, the number of examples in each bucket.
      batch_sizes: `[K]` integers, the B of each bucket.
      costs: `[K]` numbers, the cost of a batch of each bucket.
      dominates: `[K, K]` bool, whether bucket j can take the remainder of bucket k at
        `[k, j]`; only later buckets can.
      policy: "cheapest"; "promote" to pass every remainder on to the dominating bucket
        with the cheapest rows, if there is one; "pad" to pad every remainder; or "drop"
        to leave out every remainder.

    Raises:
      ValueError: if the policy is unknown, or a bucket dominates a later one.
    """
    check_choice("remainder", policy, get_args(Remainder))
    counts, batch_sizes = (np.asarray(x, np.int64) for x in (counts, batch_sizes))
    costs, dominates = np.asarray(costs), np.asarray(dominates, bool)
    if np.tril(dominates).any():
        lower, upper = np.argwhere(np.tril(dominates))[0].tolist()
        raise ValueError(
            f"`dominates[{lower}, {upper}]` is True, but a remainder can only go to a "
            "later bucket. Sort the buckets as `shape_order` does."
        )
    buckets = _Buckets(counts, batch_sizes, costs, dominates)
    if policy == "drop":
        return buckets.flow(np.full(len(counts), -1), drop=True)
    if policy != "cheapest":
        return buckets.flow(buckets.simple_targets()[policy])
    known = [*buckets.simple_targets().values(), *buckets.chain_targets()]
    flow = min((buckets.flow(targets) for targets in known), key=buckets.cost)
    targets, exact = _search(buckets, buckets.cost(flow))
    if targets is not None:
        flow = min(buckets.flow(targets), flow, key=buckets.cost)
    return dataclasses.replace(flow, exact=exact)


@dataclasses.dataclass(frozen=True)
class _Buckets:
    """The arguments of `flow_remainders_between`, as arrays."""

    counts: np.ndarray
    batch_sizes: np.ndarray
    costs: np.ndarray
    dominates: np.ndarray

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def rates(self) -> np.ndarray:
        """`[K]` float64: the cost of a row."""
        return self.costs.astype(np.float64) / self.batch_sizes

    def cost(self, flow: RowFlow) -> float:
        return epoch_cost(flow.batches, self.costs)

    def simple_targets(self) -> dict[str, np.ndarray]:
        """Returns the targets of the policies "pad" and "promote"."""
        nowhere = np.full(len(self), -1)
        rates = np.where(self.dominates, self.rates, np.inf)
        cheapest = np.where(self.dominates.any(axis=1), rates.argmin(axis=1), -1)
        return {"pad": nowhere, "promote": cheapest}

    def chain_targets(self) -> list[np.ndarray]:
        """Returns the targets of `flow_remainders` if the buckets are a chain."""
        if not np.diagonal(self.dominates, 1).all():
            return []
        flow = flow_remainders(self.counts, self.batch_sizes, self.costs)
        after = np.append(flow.carried[1:], 0)
        return [np.where(after > 0, np.arange(1, len(self) + 1), -1)]

    def flow(self, targets: np.ndarray, drop: bool = False) -> FlowBetween:
        """Returns the flow if each remainder goes to its target."""
        targets = targets.copy()
        carried, batches, rows, dropped = np.zeros((4, len(self)), np.int64)
        for k, target in enumerate(targets.tolist()):
            total = self.counts[k] + carried[k]
            batches[k], rest = divmod(total, self.batch_sizes[k])
            rows[k] = total - rest
            if not rest:
                targets[k] = -1
            elif drop:
                dropped[k] = rest
            elif target >= 0:
                carried[target] += rest
            else:
                batches[k] += 1
                rows[k] = total
        return FlowBetween(self.counts, carried, batches, rows, dropped, targets)


@dataclasses.dataclass
class _States:
    """Partial choices of targets for the first buckets, `[S]` or `[S, K]` each.

    Attributes:
      carried: `[S, K]` int64, the rows passed on to each bucket.
      targets: `[S, K]` int64, the targets chosen so far.
      cost: `[S]` float64, the cost of the batches so far.
    """

    carried: np.ndarray
    targets: np.ndarray
    cost: np.ndarray

    def take(self, index: np.ndarray) -> _States:
        return _States(self.carried[index], self.targets[index], self.cost[index])


def _search(buckets: _Buckets, limit: float) -> tuple[np.ndarray | None, bool]:
    """Returns targets that cost less than a limit, and whether the search was complete.

    The targets are None if none were found.
    """
    width = max(1, _WORK // len(buckets) ** 2)
    zeros = np.zeros((1, len(buckets)), np.int64)
    states, exact = _States(zeros, zeros - 1, np.zeros(1)), True
    costs = buckets.costs.astype(np.float64)
    for k in range(len(buckets)):
        states = _extend(states, buckets, k, costs[k])
        rows = states.carried[:, k + 1 :] + buckets.counts[k + 1 :]
        bound = states.cost + _least_cost(buckets, rows, k + 1)
        kept = np.flatnonzero(bound < limit * _SLACK)
        kept = kept[_cheapest_of_each(rows[kept], states.cost[kept])]
        if len(kept) > width:
            kept = kept[np.argsort(bound[kept], kind="stable")[:width]]
            exact = False
        states = states.take(kept)
    if not len(states.cost):
        return None, exact
    return states.targets[np.argmin(states.cost)], exact


def _least_cost(buckets: _Buckets, rows: np.ndarray, first: int) -> np.ndarray:
    """Returns a lower bound of the cost of rows in the buckets from `first` on, `[S]`.

    Full batches are never passed on, because more rows only make more of them. A row of
    a remainder costs at least what a row costs in the bucket or in one that dominates
    it; or else, a remainder costs a batch where no bucket can take it.

    Args:
      buckets: all K buckets.
      rows: `[S, K - first]` int64, the rows in each bucket.
      first: the first bucket that is still open.
    """
    costs = buckets.costs[first:].astype(np.float64)
    above = buckets.dominates[first:, first:]
    rates = buckets.rates[first:]
    passed = np.where(above, rates, np.inf).min(axis=1, initial=np.inf)
    is_last = ~above.any(axis=1)
    full, rest = np.divmod(rows, buckets.batch_sizes[first:])
    by_row = rest @ np.minimum(rates, passed)
    by_batch = (rest[:, is_last] > 0) @ costs[is_last]
    return full @ costs + np.maximum(by_row, by_batch)


def _extend(states: _States, buckets: _Buckets, k: int, cost: float) -> _States:
    """Returns the states with every choice for the remainder of bucket k."""
    rows = states.carried[:, k] + buckets.counts[k]
    full, rest = np.divmod(rows, buckets.batch_sizes[k])
    spent = states.cost + full * cost
    parts = [_States(states.carried, states.targets, spent + (rest > 0) * cost)]
    passed = np.flatnonzero(rest)
    for target in np.flatnonzero(buckets.dominates[k]).tolist() if passed.size else ():
        part = states.take(passed)
        part.carried[:, target] += rest[passed]
        part.targets[:, k] = target
        parts.append(dataclasses.replace(part, cost=spent[passed]))
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return _States(*map(np.concatenate, columns))


def _cheapest_of_each(rows: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Returns the cheapest of the states with equal rows in all later buckets."""
    # Equal rows have equal hashes, so they are neighbors in this order.
    odd = 2 * np.arange(rows.shape[1]).astype(np.uint64) + np.uint64(1)
    order = np.lexsort([cost, rows.astype(np.uint64) @ (odd * _HASH_FACTOR)])
    is_new = np.ones(len(order), bool)
    is_new[1:] = (rows[order[1:]] != rows[order[:-1]]).any(axis=1)
    return np.sort(order[is_new])
