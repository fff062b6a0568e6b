"""The cheapest epoch over all sets of shapes, if there are few enough."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from jaxbucket.plan.flow.dominance import dominates, fits
from jaxbucket.plan.joint.pricing import Prices

# The targets of remainders of up to this many shapes are enumerated as well.
MAX_SHAPES = 5
# The number of rates that are compared in all, and at a time.
_MAX_WORK, _CHUNK = 40_000_000, 1 << 20


def least_costs(counts: np.ndarray, above: np.ndarray, prices: Prices) -> np.ndarray:
    """Returns the cost of an epoch with the cheapest remainders, `[n]`.

    Args:
      counts: `[n, K]` integers, the examples of each shape, in the order of a plan.
      above: `[n, K, K]` bool, which shapes dominate which.
      prices: what batches of the shapes hold and cost, `[n, K]` each.
    """
    size = counts.shape[1]
    least = np.full(len(counts), np.inf)
    # Bucket k passes its remainder on to its target, or pads it if that is k itself.
    for targets in itertools.product(*(range(k, size) for k in range(size))):
        rows, cost = counts.copy(), np.zeros(len(counts))
        for k, target in enumerate(targets):
            full, rest = np.divmod(rows[:, k], prices.batch_sizes[:, k])
            cost += full * prices.costs[:, k]
            if target == k:
                cost += (rest > 0) * prices.costs[:, k]
            else:
                rows[:, target] += rest
                cost[~above[:, k, target]] = np.inf
        np.minimum(least, cost, out=least)
    return least


@dataclasses.dataclass(frozen=True)
class Enumeration:
    """A branch-and-bound search over all sets of shapes.

    Attributes:
      lengths: `[P, Q]` integers, the T that each point needs.
      counts: `[P]` integers, its number of examples.
      seq_lens: `[C, Q]` integers, the T of the shapes, in the order of a plan.
      prices: what batches of these shapes hold and cost.
      num_buckets: the largest number of shapes.
      fixed: `[n]` integers, shapes that are always chosen, at most one.
    """

    lengths: np.ndarray
    counts: np.ndarray
    seq_lens: np.ndarray
    prices: Prices
    num_buckets: int
    fixed: np.ndarray

    def best(self, limit: float) -> tuple[np.ndarray | None, float, bool]:
        """Returns the cheapest shapes, `[K]` indices, and the cost of their epoch.

        Args:
          limit: only cheaper epochs are of interest.

        Returns:
          The shapes, or None if no epoch is cheaper than the limit; the cost; and
          whether all sets of shapes were compared.
        """
        best, work = None, 0
        held = fits(self.lengths, self.seq_lens).T
        rates = np.where(held, self.prices.rates[:, None], np.inf)
        # `[C + 1, P]`: the lowest rates among the shapes from each one on.
        later = np.full((len(rates) + 1, held.shape[1]), np.inf)
        later[:-1] = np.minimum.accumulate(rates[::-1])[::-1]
        fixed_rates = rates[self.fixed].min(axis=0, initial=np.inf)
        sets, paid = np.zeros((1, 0), np.int64), fixed_rates[None]
        for _ in range(self.num_buckets - len(self.fixed) + 1):
            complete = sets[paid @ self.counts < limit]
            if complete.shape[1] + len(self.fixed):
                candidate, cost = self._cheapest(complete, rates)
                if cost < limit:
                    best, limit = candidate, cost
            extended = []
            for parents, shapes in self._extensions(sets):
                work += len(parents) * paid.shape[1]
                if work > _MAX_WORK:
                    return best, limit, False
                new = np.minimum(paid[parents], rates[shapes])
                ahead = np.minimum(new, later[shapes + 1]) @ self.counts
                kept = ahead < limit
                members = np.column_stack([sets[parents[kept]], shapes[kept]])
                extended.append((members, new[kept]))
            if not extended:
                break
            sets, paid = map(np.concatenate, zip(*extended, strict=True))
        return best, limit, True

    def _extensions(self, sets: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields chunks of sets, `[n]`, and a later shape to add to each, `[n]`."""
        last = sets[:, -1] if sets.shape[1] else np.full(len(sets), -1)
        size = max(1, _CHUNK // (len(self.seq_lens) * len(self.counts)))
        free = np.ones(len(self.seq_lens), bool)
        free[self.fixed] = False
        for start in range(0, len(sets), size):
            later = np.arange(len(self.seq_lens)) > last[start : start + size, None]
            parents, shapes = np.nonzero(later & free)
            yield parents + start, shapes

    def _cheapest(
        self, sets: np.ndarray, rates: np.ndarray
    ) -> tuple[np.ndarray, float]:
        """Returns the set with the cheapest epoch, and its cost."""
        fixed = np.broadcast_to(self.fixed, (len(sets), len(self.fixed)))
        sets = np.sort(np.concatenate([sets, fixed], axis=1), axis=1)
        best, least = sets[:0], np.inf
        size = max(1, _CHUNK // max(1, sets.shape[1] * len(self.counts)))
        for start in range(0, len(sets), size):
            part = sets[start : start + size]
            cheapest = rates[part].argmin(axis=1)
            chosen = cheapest[:, None] == np.arange(part.shape[1])[:, None]
            counts = (chosen @ self.counts).astype(np.int64)
            above = dominates(self.seq_lens[part])
            prices = Prices(*(column[part] for column in self.prices))
            costs = least_costs(counts, above, prices)
            if costs.min() < least:
                best, least = part[np.argmin(costs)], float(costs.min())
        return best, least
