"""From the easy to the hard: orders by a difficulty that a pacing function opens up."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.digest import digest
from jaxbucket.base.permutation import fold, permute
from jaxbucket.schedule.difficulty_index import DifficultyIndex
from jaxbucket.schedule.epoch_rows import EpochRows
from jaxbucket.schedule.opening import OpeningSteps
from jaxbucket.schedule.orders import LOCK, shuffled
from jaxbucket.schedule.pacing import (
    LinearPacing,
    Pacing,
    check_pacing,
    open_share,
    pacing_name,
)

# A share is rounded to so many parts: powers differ between machines in the last bit.
_PARTS = 10**9
_EPOCHS_KEPT = 2
# Below this, every integer is a float.
_EXACT = 2.0**53
# Weights of buckets as integers.
_ONE = 2**32


class Curriculum:
    """An order: at every step, only what is easy enough.

    The pacing function opens a share of the examples, the easiest ones and all that are
    as easy. A batch is drawn at random among those that are open and were not in the
    epoch yet; only where they fill no batch of any bucket, the easiest of the others
    fill up the batch that needs the least hard ones. So an epoch still holds every
    example once, and what is drawn early is missing later on.

    With `replacement=True` every step draws from all that is open, whatever was
    drawn before: easy examples come again and again, and an epoch is only a number of
    steps.

    Example:
      >>> from jaxbucket import BatchSchedule, Bucket, BucketPlan
      >>> plan = BucketPlan((Bucket(2, 8),), max_tokens=16)
      >>> order = Curriculum([5, 1, 4, 2, 3, 6], LinearPacing(start=0.3))
      >>> for batch in BatchSchedule(plan, [8] * 6, order=order):
      ...     print(sorted(batch.rows.tolist()))
      [1, 3]
      [2, 4]
      [0, 5]

    Args:
      difficulty: `[N]` finite numbers, one for each example, or a `DifficultyIndex`. It
        is referred to and not copied: do not change the array afterwards.
      pacing: epochs done -> share that is open, from 0 to 1; by default
        `LinearPacing()`. It may fall, for example in cycles. A schedule that was made
        by `continue_with` counts its own epochs.
      replacement: see above.

    Raises:
      ValueError: if `difficulty` is empty, not `[N]` or not finite, or `pacing` is no
        function.
    """

    def __init__(
        self,
        difficulty: ArrayLike | DifficultyIndex,
        pacing: Pacing | None = None,
        *,
        replacement: bool = False,
    ):
        self.difficulty = _check_difficulty(difficulty)
        self._index = difficulty if isinstance(difficulty, DifficultyIndex) else None
        self.pacing = LinearPacing() if pacing is None else pacing
        check_pacing(self.pacing)
        self.replacement = bool(replacement)

    def __repr__(self) -> str:
        return (
            f"Curriculum({len(self.difficulty)} examples, {self.pacing}, "
            f"replacement={self.replacement})"
        )

    def __str__(self) -> str:
        """A name that tells it from others, by what it does."""
        kind = "curriculum with replacement" if self.replacement else "curriculum"
        return f"{kind} {self._fingerprint[:16]}"

    def check_size(self, size: int) -> None:
        """Raises a ValueError unless there is a difficulty for each of the examples."""
        if len(self.difficulty) != size:
            raise ValueError(
                f"`difficulty` has {len(self.difficulty)} entries for {size} lengths. "
                "Give one for each example."
            )

    def in_order(self, kept: np.ndarray | None) -> np.ndarray:
        """Returns the difficulties of all examples, or of `[N]` kept ones, sorted."""
        if self._index is None or self._index.sorted_by != "all":
            own = self.difficulty
            return np.sort(own if kept is None else own[kept])
        # That is what it was sorted for.
        examples = self._index.examples
        return self.difficulty[examples if kept is None else examples[kept[examples]]]

    def open_parts(self, epochs: float) -> int:
        """Returns the share that is open, in parts of 10**9.

        Raises:
          ValueError: if the pacing function gives no number from 0 to 1.
        """
        return round(open_share(self.pacing, epochs) * _PARTS)

    @functools.cached_property
    def _fingerprint(self) -> str:
        pacing = "\n".join(pacing_name(self.pacing))
        return digest(_same_bytes(self.difficulty), pacing.encode())


def _check_difficulty(difficulty: ArrayLike | DifficultyIndex) -> np.ndarray:
    if isinstance(difficulty, DifficultyIndex):
        # Of examples that are not in the order of all, their place is what counts.
        is_by_all = difficulty.sorted_by == "all"
        return difficulty.difficulty if is_by_all else difficulty.ranks()
    try:
        array = np.asarray(difficulty)
    except ValueError:
        raise ValueError(
            "`difficulty` is ragged: give one number for each example, [N]."
        ) from None
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iuf":
        raise ValueError(
            f"`difficulty` is {array.dtype}{list(array.shape)}: give one number for "
            "each example, [N]."
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        bad = int(np.argmin(np.isfinite(array)))
        raise ValueError(
            f"`difficulty[{bad}]={array[bad]}` is not finite. Give the example a "
            "number, or leave it out."
        )
    return array


def _same_bytes(difficulty: np.ndarray) -> bytes | memoryview:
    """The numbers, whatever their dtype."""
    as_floats = np.ascontiguousarray(difficulty, "<f8")
    if difficulty.dtype.kind != "f" and np.any(abs(as_floats) >= _EXACT):
        # Not all of these are floats.
        return "\n".join(map(str, difficulty.tolist())).encode()
    return as_floats.data


class Pace:
    """The greatest difficulty that is open, by batch.

    Args:
      curriculum: difficulties and pacing.
      rows: the rows of an epoch.
      lengths: `[N]`, to leave out those that the plan drops.
    """

    def __init__(self, curriculum: Curriculum, rows: EpochRows, lengths: np.ndarray):
        drops = rows.plan.overlong == "drop"
        kept = lengths <= rows.plan.max_seq_len if drops else None
        self._curriculum = curriculum
        self._sorted = curriculum.in_order(kept)
        self._num_batches = rows.num_batches

    def at(self, epoch: int, position: int) -> Any:
        """Returns what a batch may have at most, as a number of the array's dtype."""
        parts = self._curriculum.open_parts(epoch + position / self._num_batches)
        count = -(-parts * len(self._sorted) // _PARTS)
        return self._sorted[max(count, 1) - 1]

    def of_epoch(self, epoch: int) -> np.ndarray:
        """Returns it for all batches of an epoch, `[num_batches]`."""
        return np.array([self.at(epoch, p) for p in range(self._num_batches)])


class PacedOrder:
    """Draws without replacement, so that an epoch has to be dealt from its beginning.

    The last two epochs asked for are kept, for those who load ahead are in the next one
    already: 4 bytes per example each.

    Args:
      curriculum: difficulties and pacing.
      rows: the rows of an epoch.
      lengths: `[N]` integers.
      seed: another one has other batches.
      opening: how the first epoch begins, if that is planned.
    """

    def __init__(
        self,
        curriculum: Curriculum,
        rows: EpochRows,
        lengths: np.ndarray,
        seed: int,
        opening: OpeningSteps | None,
    ):
        self._difficulty = curriculum.difficulty
        self._pace = Pace(curriculum, rows, lengths)
        self._rows = rows
        self._seed = seed
        planned = opening.batches if opening is not None else np.empty(0, np.int64)
        self._opening = rows.bucket_of(planned).tolist()
        self._epochs: dict[int, _Dealt] = {}

    def batch(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        dealt = self._dealt(epoch)
        rows = dealt.examples[dealt.ends[position] : dealt.ends[position + 1]]
        return int(dealt.buckets[position]), rows.astype(np.int64)

    def buckets(self, epoch: int) -> np.ndarray:
        return self._dealt(epoch).buckets

    def _dealt(self, epoch: int) -> _Dealt:
        with LOCK:
            if epoch not in self._epochs:
                self._epochs[epoch] = self._deal(epoch)
                for old in list(self._epochs)[:-_EPOCHS_KEPT]:
                    del self._epochs[old]
            return self._epochs[epoch]

    def _deal(self, epoch: int) -> _Dealt:
        pace = self._pace.of_epoch(epoch)
        pools = [self._pool(epoch, k, pace) for k in range(len(self._rows.plan))]
        opening = self._opening if epoch == 0 else []
        buckets, batches = [], []
        for position in range(self._rows.num_batches):
            falls = position > 0 and pace[position] < pace[position - 1]
            for pool in pools:
                pool.open(position, again=bool(falls))
            key = fold(self._seed, epoch, len(pools), position)
            if position < len(opening):
                bucket = opening[position]
            else:
                bucket = _choose(pools, key)
            buckets.append(bucket)
            batches.append(pools[bucket].draw(key))
        ends = np.cumsum([0, *map(len, batches)])
        return _Dealt(np.array(buckets), ends, np.concatenate(batches))

    def _pool(self, epoch: int, bucket: int, pace: np.ndarray) -> _Pool:
        """The rows that this bucket has in a shuffled epoch, by difficulty."""
        row = np.arange(self._rows.flow.rows[bucket])
        examples = self._rows.examples(bucket, row, shuffled(self._seed, epoch))
        difficulty = self._difficulty[examples]
        order = np.argsort(difficulty, kind="stable")
        examples, difficulty = examples[order], difficulty[order]
        return _Pool(
            examples.astype(_narrow(len(self._difficulty))),
            difficulty,
            np.searchsorted(difficulty, pace, side="right").tolist(),
            int(self._rows.sizes[bucket]),
        )


class _Dealt(NamedTuple):
    """An epoch: `[S]` buckets, `[S + 1]` ends of the batches, examples end to end."""

    buckets: np.ndarray
    ends: np.ndarray
    examples: np.ndarray


class _Pool:
    """What is left of a bucket in an epoch: open and waiting.

    Args:
      examples: `[n]`, the easiest first.
      difficulty: `[n]` theirs.
      open_at: `[S]`, how many of all are open at each batch of the epoch.
      size: rows of a full batch.
    """

    def __init__(
        self,
        examples: np.ndarray,
        difficulty: np.ndarray,
        open_at: list[int],
        size: int,
    ):
        self._examples = examples
        self._difficulty = difficulty
        self._open_at = open_at
        self._size = size
        # Places in `examples`; those in front of `_next` are open, or were drawn.
        self._waiting = np.arange(len(examples), dtype=_narrow(len(examples)))
        self._next = 0
        self._open = np.empty_like(self._waiting)
        self._num_open = 0

    @property
    def _left(self) -> int:
        return self._num_open + len(self._waiting) - self._next

    @property
    def _need(self) -> int:
        """Rows of the next batch; the last one may have fewer."""
        return min(self._size, self._left)

    @property
    def batches_open(self) -> int:
        """How many batches can be filled with what is open."""
        if self._num_open == self._left:
            return -(-self._left // self._size)
        return self._num_open // self._size

    @property
    def hardest_needed(self) -> float:
        """The difficulty that the next batch needs; inf if there is no next one."""
        if not self._left:
            return math.inf
        last = self._next + max(self._need - self._num_open, 1) - 1
        # As Python's number: exact, also among integers that are no floats.
        return self._difficulty[self._waiting[last]].item()

    def open(self, position: int, *, again: bool) -> None:
        """Opens what the pace allows; `again`, if it has fallen."""
        if again:
            left = (self._open[: self._num_open], self._waiting[self._next :])
            self._waiting = np.sort(np.concatenate(left))
            self._next = self._num_open = 0
        # As it is: for a number of another dtype numpy would convert the whole array.
        limit = self._waiting.dtype.type(self._open_at[position])
        self._move(int(np.searchsorted(self._waiting[self._next :], limit)))

    def _move(self, count: int) -> None:
        moved = self._waiting[self._next : self._next + count]
        self._open[self._num_open : self._num_open + count] = moved
        self._num_open += count
        self._next += count

    def draw(self, key: int) -> np.ndarray:
        """Returns the examples of the next batch, all open ones if they do not do."""
        need = self._need
        self._move(max(0, need - self._num_open))
        slots = permute(np.arange(need), self._num_open, key)
        drawn = self._open[slots]
        # The last ones take the places of those that were drawn.
        end = self._num_open - need
        stays = np.ones(need, bool)
        stays[slots[slots >= end] - end] = False
        self._open[slots[slots < end]] = self._open[end : self._num_open][stays]
        self._num_open = end
        return self._examples[drawn]


def _narrow(size: int) -> type[np.integer]:
    """The dtype that takes the least memory for indices below `size`."""
    return np.uint32 if size < 2**32 else np.int64


def _choose(pools: list[_Pool], key: int) -> int:
    """A bucket at random by the batches it can fill, or the one that comes nearest."""
    weights = [pool.batches_open for pool in pools]
    if any(weights):
        return _draw_index(weights, key)
    needed = [pool.hardest_needed for pool in pools]
    return needed.index(min(needed))


def _draw_index(weights: list[int], key: int) -> int:
    ends = list(itertools.accumulate(weights))
    # 64 bits scaled to [0, total).
    return bisect.bisect_right(ends, (fold(key) * ends[-1]) >> 64)


class EasyDraws:
    """Draws with replacement: any step from all that is open.

    Args:
      curriculum: difficulties and pacing.
      rows: the rows of an epoch, of which the numbers alone count; sorted by difficulty
        within each bucket.
      lengths: `[N]` integers.
      seed: another one has other batches.
    """

    def __init__(
        self,
        curriculum: Curriculum,
        rows: EpochRows,
        lengths: np.ndarray,
        seed: int,
    ):
        self._pace = Pace(curriculum, rows, lengths)
        self._rows = rows
        self._seed = seed
        self._sorted = [
            curriculum.difficulty[rows.own(bucket)] for bucket in range(len(rows.plan))
        ]

    def batch(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        bucket, count, key = self._bucket(epoch, position)
        size = int(self._rows.sizes[bucket])
        drawn = permute(np.arange(min(size, count)), count, key)
        # Fewer than a batch come more than once, so that each is drawn as often.
        return bucket, self._rows.own(bucket)[np.resize(drawn, size)].astype(np.int64)

    def buckets(self, epoch: int) -> np.ndarray:
        positions = range(self._rows.num_batches)
        return np.array([self._bucket(epoch, position)[0] for position in positions])

    def _bucket(self, epoch: int, position: int) -> tuple[int, int, int]:
        """The bucket, how many of its examples are open, and a key."""
        pace = self._pace.at(epoch, position)
        counts = [int(np.searchsorted(x, pace, side="right")) for x in self._sorted]
        sizes = self._rows.sizes.tolist()
        weights = [n * _ONE // size for n, size in zip(counts, sizes, strict=True)]
        key = fold(self._seed, epoch, len(sizes), position)
        bucket = _draw_index(weights, key)
        return bucket, counts[bucket], key
