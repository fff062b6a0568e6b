"""Statistics of one epoch of a plan: padding, tokens, steps, cost, lost examples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_accumulate, check_choice
from jaxbucket.base.policies import GROUPS, Group
from jaxbucket.base.sizes import Counted
from jaxbucket.plan.chunks import chunk_lengths
from jaxbucket.plan.flow.remainder import (
    Remainder,
    RowFlow,
    epoch_cost,
    epoch_flow,
    filler_bucket,
)
from jaxbucket.plan.reports.epoch_report import BucketReport, Report, tokens_by_name
from jaxbucket.plan.tally import Tally

# A limit is wasteful if all batches are smaller by this factor, or if it causes this
# share of the positions of an epoch.
_MUCH_LESS, _MUCH = 2, 0.1


def report(
    plan: BucketPlan,
    lengths: Counted,
    *,
    remainder: Remainder = "cheapest",
    accumulate: int = 1,
    group: Group = "same",
) -> Report:
    """Returns the exact numbers of one epoch of a plan on a set of lengths.

    If remainders are dropped, the number of real tokens is the mean over all choices of
    the dropped examples. With "repeat" and "mixed", the batches that complete the
    last step are counted as empty ones of the cheapest bucket, because the order
    decides which batches they repeat.

    Example:
      >>> from jaxbucket import Bucket
      >>> plan = BucketPlan((Bucket(4, 8), Bucket(2, 16)), max_tokens=32)
      >>> print(report(plan, [8, 8, 8, 8, 6, 10]).summary)
      2 steps per epoch, 48 real tokens in 64.
      25.0% padding: 25.0% in rows, 0.0% in empty rows.

    Args:
      plan: the shapes.
      lengths: `[N]` integers, one per example: the lengths that the plan was made for,
        or others; or their `LengthCounts`. With several sequences, a mapping from
        sequence name to `[N]`. Under `overlong="split"`, one per example or one per
        chunk.
      remainder: what happens to examples that do not fill a batch: "cheapest" moves
        them to longer buckets if that costs less, "promote" always moves them, "pad"
        leaves them in batches with empty rows, and "drop" leaves them out. "repeat" is
        "cheapest", but rows that would be empty repeat examples of their batch.
      accumulate: micro-batches per step.
      group: whether the micro-batches of a step have the "same" bucket or are "mixed".

    Raises:
      ValueError: if the plan is for packed rows, the lengths are not valid for the
        plan, the remainder or the group is unknown, or `accumulate` is not positive.
    """
    check_choice("group", group, GROUPS)
    if plan.packed:
        raise ValueError(
            "`plan` is for packed rows, and its padding depends on the packing. Use "
            "the `report` of `plan_packing` or of a `BatchSchedule` with `packing`, or "
            "pass `plan.unpacked` with the lengths of rows."
        )
    accumulate = check_accumulate(accumulate)
    tally = Tally.of(plan, lengths)
    counts, by_sequence = tally.examples, tally.tokens
    # The batches of a step that have the same bucket are filled together.
    together = accumulate if group == "same" else 1
    sizes = plan.batch_sizes * together
    flow = epoch_flow(plan, counts, sizes, plan.costs, remainder)
    steps, batches = _steps(plan, flow, accumulate, together)
    lost = (flow.dropped / np.maximum(counts, 1)) @ by_sequence
    kept = by_sequence.sum(axis=0) - np.rint(lost).astype(np.int64)
    tokens = by_sequence.sum(axis=1)
    real = int(kept.sum())
    padded = int(epoch_cost(batches, plan.batch_sizes * plan.tokens_per_row))
    in_rows = int(epoch_cost(flow.rows, plan.tokens_per_row))
    return Report(
        buckets=_bucket_reports(plan, flow, batches, tokens),
        steps_per_epoch=steps,
        examples=int(counts.sum() - flow.dropped.sum()),
        real_tokens=real,
        padded_tokens=padded,
        padding=1 - real / max(padded, 1),
        padding_in_rows=(in_rows - real) / max(padded, 1),
        padding_in_empty_rows=(padded - in_rows) / max(padded, 1),
        left_over_examples=int(flow.dropped.sum()),
        repeated_rows=(remainder == "repeat")
        * int((batches * plan.batch_sizes - flow.rows).sum()),
        epoch_cost=epoch_cost(batches, plan.costs),
        cost_unit=plan.cost_unit,
        sequence_tokens=tokens_by_name(plan.sequences, kept),
        wasteful_limits=tuple(_wasteful_limits(plan, flow, batches, together)),
        **tally.changes,
    )


def _steps(
    plan: BucketPlan, flow: RowFlow, accumulate: int, together: int
) -> tuple[int, np.ndarray]:
    """Returns the steps of an epoch, and the batches of each bucket, `[K]` integers."""
    steps = -(-flow.num_batches * together // accumulate)
    batches = flow.batches * together
    # Empty batches complete the last step.
    filler = plan.buckets.index(filler_bucket(plan))
    batches[filler] += steps * accumulate - batches.sum()
    return steps, batches


def _wasteful_limits(
    plan: BucketPlan, flow: RowFlow, batches: np.ndarray, together: int
) -> Iterator[str]:
    """Yields a sentence about each limit of the plan that its examples do not need."""
    largest = max(bucket.num_tokens for bucket in plan.buckets)
    if isinstance(plan.max_tokens, int) and largest * _MUCH_LESS <= plan.max_tokens:
        yield (
            f"No batch has more than {largest:,} of the {plan.max_tokens:,} positions "
            "that `max_tokens` allows."
        )
    multiple = plan.batch_size_multiple
    padded = epoch_cost(batches, plan.batch_sizes * plan.tokens_per_row)
    is_least = (plan.batch_sizes == multiple) & (flow.batches == 1)
    rows = (multiple * together - flow.rows) * plan.tokens_per_row
    empty = int(rows[is_least].sum())
    if empty > _MUCH * padded:
        yield (
            f"{empty / padded:.1%} of the positions are empty rows of buckets with "
            f"fewer examples than `batch_size_multiple={multiple}`."
        )


def changed_examples(plan: BucketPlan, lengths: Counted) -> dict[str, int]:
    """Returns the fields of a `Report` about examples left out, truncated or split.

    Args:
      plan: the shapes.
      lengths: as for `report`.
    """
    return Tally.of(plan, lengths).changes


def row_lengths(plan: BucketPlan, lengths: np.ndarray) -> np.ndarray:
    """Returns the lengths of rows: those of chunks if the plan splits examples."""
    if plan.overlong != "split":
        return lengths
    return chunk_lengths(lengths, plan.max_seq_len)


def _bucket_reports(
    plan: BucketPlan, flow: RowFlow, batches: np.ndarray, tokens: np.ndarray
) -> tuple[BucketReport, ...]:
    all_tokens = max(epoch_cost(batches, plan.batch_sizes * plan.tokens_per_row), 1)
    all_costs = epoch_cost(batches, plan.costs) or 1
    # Python's integers do not overflow.
    columns = (flow.counts, flow.carried, flow.rows, flow.dropped)
    columns = (column.tolist() for column in (*columns, batches, tokens, plan.costs))
    return tuple(
        BucketReport(
            batch_size=bucket.batch_size,
            seq_len=bucket.to_list()[1],
            examples=examples,
            carried=carried,
            batches=number,
            empty_rows=number * bucket.batch_size - rows,
            left_over=left_over,
            padding=_padding_share(examples * bucket.tokens_per_row, real),
            token_share=number * bucket.num_tokens / all_tokens,
            cost_share=number * cost / all_costs,
        )
        for bucket, examples, carried, rows, left_over, number, real, cost in zip(
            plan.buckets, *columns, strict=True
        )
    )


def _padding_share(positions: int, tokens: float) -> float:
    return (positions - tokens) / max(positions, 1)
