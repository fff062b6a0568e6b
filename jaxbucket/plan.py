"""From lengths to a plan: which boundaries, then the rows each bucket may hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket import boundaries as choosers
from jaxbucket.base import OVERLONG, Bucket, BucketPlan, Overlong
from jaxbucket.boundaries import Candidates, Chooser
from jaxbucket.checks import (
    check_choice,
    check_lengths,
    check_positive,
    overlong_message,
)
from jaxbucket.chunks import chunk_lengths

Boundaries: TypeAlias = (
    Literal["optimal", "quantile", "geometric"] | Sequence[int] | Chooser
)

_CHOOSERS: dict[str, Chooser] = {
    "optimal": choosers.optimal,
    "quantile": choosers.quantile,
    "geometric": choosers.geometric,
}
_DENSE_HISTOGRAM = 1 << 24


def plan_buckets(
    lengths: ArrayLike,
    *,
    max_tokens: int,
    num_buckets: int = 8,
    batch_size_multiple: int = 1,
    seq_len_multiple: int = 1,
    max_seq_len: int | None = None,
    boundaries: Boundaries = "optimal",
    overlong: Overlong = "error",
) -> BucketPlan:
    """Returns at most `num_buckets` shapes (B, T) for examples of these lengths.

    T is a multiple of `seq_len_multiple`, and B the largest multiple of
    `batch_size_multiple` with B * T <= `max_tokens`. Both multiples are yours to
    choose once: a plan must not depend on the machine it happens to run on.

    Example:
      >>> import numpy as np
      >>> lengths = np.random.default_rng(0).integers(1, 500, size=1000)
      >>> plan = plan_buckets(
      ...     lengths, max_tokens=4096, num_buckets=3, seq_len_multiple=64
      ... )
      >>> [str(bucket) for bucket in plan.buckets]
      ['[21, 192]', '[10, 384]', '[8, 512]']

    Args:
      lengths: `[N]` integers, one per example.
      max_tokens: the hard budget of a global batch, padding counted.
      num_buckets: how many shapes at most; each costs one compilation.
      batch_size_multiple: for example the number of devices on the batch axes.
      seq_len_multiple: for example the tile of the accelerator's matrix unit.
      max_seq_len: T of the last bucket, a multiple of `seq_len_multiple`. By default
        the longest length, rounded up.
      boundaries: "optimal" costs the fewest padded tokens over one epoch, remainders
        included (`boundaries.optimal` says how exactly); "quantile" puts equally many
        examples in each bucket; "geometric" grows T by a constant ratio. Or your own:
        increasing lengths (then `num_buckets` and `max_seq_len` are not used), or a
        function of (`Candidates`, `num_buckets`).
      overlong: what to do with examples longer than the last bucket: "error", "drop",
        "truncate", or "split" to plan for the chunks that `split_source` makes of them.

    Raises:
      ValueError: for lengths that are empty, not integers or not positive, or longer
        than `max_seq_len` under `overlong="error"`; for a budget that cannot hold
        `batch_size_multiple` rows of the last bucket; for boundaries that are not
        increasing multiples of `seq_len_multiple`.
    """
    lengths = check_lengths(lengths)
    check_choice("overlong", overlong, OVERLONG)
    max_tokens = check_positive("max_tokens", max_tokens)
    num_buckets = check_positive("num_buckets", num_buckets)
    batch_size_multiple = check_positive("batch_size_multiple", batch_size_multiple)
    seq_len_multiple = check_positive("seq_len_multiple", seq_len_multiple)

    def batch_sizes(seq_lens: np.ndarray) -> np.ndarray:
        return max_tokens // seq_lens // batch_size_multiple * batch_size_multiple

    chooser, given = _chooser(boundaries)
    if given is not None:
        max_seq_len = _check_given(given, seq_len_multiple)
    last = _last_seq_len(lengths, max_seq_len, seq_len_multiple)
    if batch_sizes(np.array(last)) < 1:
        raise ValueError(_budget_message(max_tokens, last, batch_size_multiple))
    if overlong == "error" and lengths.max() > last:
        raise ValueError(overlong_message(lengths, last))
    if overlong == "split":
        lengths = chunk_lengths(lengths, last)
    if given is not None:
        seq_lens = np.array(given, np.int64)
    else:
        ends, examples = _histogram(lengths, last, seq_len_multiple, overlong)
        candidates = Candidates(ends, examples, batch_sizes(ends))
        num_buckets = min(num_buckets, len(candidates))
        seq_lens = ends[_check_chosen(chooser(candidates, num_buckets), len(ends))]
    return BucketPlan(
        tuple(map(Bucket, batch_sizes(seq_lens).tolist(), seq_lens.tolist())),
        max_tokens=max_tokens,
        batch_size_multiple=batch_size_multiple,
        seq_len_multiple=seq_len_multiple,
        overlong=overlong,
    )


def _check_given(boundaries: Sequence[int], multiple: int) -> int:
    """Returns the last of the user's boundaries, all of which are usable."""
    remedy = f"Pass increasing multiples of `seq_len_multiple={multiple}`."
    if len(boundaries) == 0:
        raise ValueError(f"`boundaries` is empty. {remedy}")
    before = 0
    for boundary in boundaries:
        whole = isinstance(boundary, int | np.integer) and not isinstance(
            boundary, bool
        )
        if not whole or boundary <= before or boundary % multiple:
            raise ValueError(f"`boundaries`: {boundary!r} after {before}. {remedy}")
        before = int(boundary)
    return before


def _check_chosen(chosen: np.ndarray, num_candidates: int) -> np.ndarray:
    """Returns what a chooser chose, which may be the user's own."""
    chosen = np.asarray(chosen)
    if (
        chosen.ndim != 1
        or not np.issubdtype(chosen.dtype, np.integer)
        or np.any(np.diff(chosen, prepend=-1) < 1)
        or not chosen.size
        or chosen[-1] != num_candidates - 1
    ):
        raise ValueError(
            f"`boundaries` chose {chosen.tolist()}: a function must return increasing "
            f"positions of candidates, the last of them {num_candidates - 1}."
        )
    return chosen


def _last_seq_len(lengths: np.ndarray, max_seq_len: int | None, multiple: int) -> int:
    if max_seq_len is None:
        return -(-int(lengths.max()) // multiple) * multiple
    max_seq_len = check_positive("max_seq_len", max_seq_len)
    if max_seq_len % multiple:
        raise ValueError(
            f"`max_seq_len={max_seq_len}` is not a multiple of "
            f"`seq_len_multiple={multiple}`. Use "
            f"{-(-max_seq_len // multiple) * multiple}."
        )
    return max_seq_len


def _budget_message(max_tokens: int, seq_len: int, multiple: int) -> str:
    return (
        f"`max_tokens={max_tokens}` holds {max_tokens // seq_len} rows of "
        f"`seq_len={seq_len}`, fewer than `batch_size_multiple={multiple}`. Raise "
        f"`max_tokens` to {seq_len * multiple}, or lower `batch_size_multiple` or "
        "`max_seq_len`."
    )


def _chooser(boundaries: Boundaries) -> tuple[Chooser, Sequence[int] | None]:
    """The function that chooses, or the lengths that are already chosen."""
    if callable(boundaries):
        return boundaries, None
    if isinstance(boundaries, Iterable) and not isinstance(boundaries, str):
        return choosers.optimal, list(boundaries)
    if boundaries not in _CHOOSERS:
        raise ValueError(
            f"`boundaries={boundaries!r}`: choose one of {sorted(_CHOOSERS)}, or pass "
            "increasing lengths or a function."
        )
    return _CHOOSERS[boundaries], None


def _histogram(
    lengths: np.ndarray, last: int, multiple: int, overlong: Overlong
) -> tuple[np.ndarray, np.ndarray]:
    """Multiples up to `last` `[G]`, and how many examples are at most that long `[G]`.

    Examples longer than `last` count as `last` when truncated and not at all when
    dropped.
    """
    if last <= _DENSE_HISTOGRAM:
        ends = np.arange(multiple, last + 1, multiple)
        per_length = _bincount_in_chunks(lengths, last)
        examples = np.cumsum(per_length[: last + 1])[ends]
    else:
        over = lengths > last
        cells = -(-lengths.astype(np.int64)[~over] // multiple) * multiple
        ends, counts = np.unique(np.append(cells, last), return_counts=True)
        examples = np.cumsum(counts) - (ends == last)
        per_length = np.array([over.sum()])
    if overlong == "truncate":
        examples[-1] += per_length[-1]
    if examples[-1] == 0:
        raise ValueError(
            f"Every example is longer than `max_seq_len={last}` and "
            "`overlong='drop'` leaves it out. Raise `max_seq_len`."
        )
    return ends, examples


def _bincount_in_chunks(lengths: np.ndarray, last: int) -> np.ndarray:
    """`[last + 2]`: examples of each length; all longer ones in the last entry."""
    counts = np.zeros(last + 2, np.int64)
    for start in range(0, lengths.size, 1 << 20):
        part = np.minimum(lengths[start : start + (1 << 20)], last + 1)
        counts += np.bincount(part, minlength=last + 2)
    return counts
