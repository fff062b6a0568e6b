"""`Report`, the numbers of one epoch of a plan: padding, steps, cost, lost examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_accumulate, check_choice
from jaxbucket.base.policies import GROUPS, Group
from jaxbucket.base.sizes import Counted, each_size
from jaxbucket.base.table import Record, format_cost, number_table
from jaxbucket.plan.flow.remainder import (
    Remainder,
    RowFlow,
    epoch_cost,
    epoch_flow,
)
from jaxbucket.plan.tally import Tally

# A limit is wasteful if all batches are smaller by this factor, or if it causes this
# share of the positions of an epoch.
_MUCH_LESS, _MUCH = 2, 0.1


@dataclasses.dataclass(frozen=True)
class BucketReport:
    """One bucket over one epoch.

    Attributes:
      batch_size: B, over all devices.
      seq_len: T, or that of each of several sequences.
      examples: examples for which this is the shortest bucket that holds them.
      carried: examples from shorter buckets that fill up batches of this bucket.
      batches: batches per epoch. A step has one batch unless it accumulates several.
      empty_rows: rows of these batches that hold no example.
      left_over: examples that do not fill a batch and are left out of the epoch.
      padding: share of the positions that are padding if each example is in its own
        bucket, empty rows not counted.
      token_share: this bucket's share of the epoch's B * T.
      cost_share: this bucket's share of the epoch's cost.
    """

    batch_size: int
    seq_len: int | dict[str, int]
    examples: int
    carried: int
    batches: int
    empty_rows: int
    left_over: int
    padding: float
    token_share: float
    cost_share: float


@dataclasses.dataclass(frozen=True)
class Report(Record):
    """One epoch of a plan on a set of lengths.

    Attributes:
      buckets: each bucket's part of the epoch.
      steps_per_epoch: optimizer updates per epoch.
      examples: examples that are trained on.
      real_tokens: positions of these examples after truncation. If remainders are
        dropped, it is the mean over epochs, because every epoch drops different ones.
      padded_tokens: sum of B * T over the batches.
      padding: 1 - real_tokens / padded_tokens.
      padding_in_rows: the part of `padding` after the end of an example.
      padding_in_empty_rows: the part of `padding` in rows without an example.
      left_over_examples: examples left out of an epoch because they do not fill a
        batch.
      repeated_rows: rows that repeat an example of their batch. They count as empty
        in all other fields, because they hold nothing new.
      dropped_examples: examples left out because they are too long.
      unselected_examples: examples that are not in the `subset` of the schedule.
      truncated_examples: examples truncated because they are too long.
      truncated_tokens: positions removed from the truncated examples.
      epoch_cost: sum of the costs of the steps.
      cost_unit: unit of the costs: "s" for seconds, or "tokens" if the plan has no
        costs.
      split_examples: examples split because they are too long; 0 if `lengths`
        already contains the lengths of chunks. All other fields count each chunk as an
        example.
      chunks: pieces into which these examples are split.
      packed_examples: examples in packed rows. All other fields count each packed row
        as an example.
      mask_bytes: size of the largest boolean mask [B, 1, T, T] over all devices, which
        separates the examples of a row if attention does not use segment ids.
      sequence_tokens: the part of `real_tokens` in each of several sequences; None if
        examples have one length.
      sequence_padding: the share of padding in the positions of each of several
        sequences.
      unit: the unit of lengths in tables and plots, such as "bytes".
      wasteful_limits: sentences about limits of the plan that are far from what its
        examples need.
    """

    buckets: tuple[BucketReport, ...]
    steps_per_epoch: int
    examples: int
    real_tokens: int
    padded_tokens: int
    padding: float
    padding_in_rows: float
    padding_in_empty_rows: float
    left_over_examples: int
    dropped_examples: int
    truncated_examples: int
    truncated_tokens: int
    epoch_cost: float
    cost_unit: str
    unselected_examples: int = 0
    repeated_rows: int = 0
    split_examples: int = 0
    chunks: int = 0
    packed_examples: int = 0
    sequence_tokens: dict[str, int] | None = None
    unit: str = "tokens"
    wasteful_limits: tuple[str, ...] = ()

    @property
    def mask_bytes(self) -> int:
        rows = ((x.batch_size, each_size(x.seq_len)) for x in self.buckets)
        return max(b * sum(t**2 for t in each) for b, each in rows)

    @property
    def sequence_padding(self) -> dict[str, float]:
        padding = {}
        for name, tokens in (self.sequence_tokens or {}).items():
            padded = sum(
                b.batches * b.batch_size * b.seq_len[name]
                for b in self.buckets
                if isinstance(b.seq_len, dict)
            )
            padding[name] = 1 - tokens / max(padded, 1)
        return padding

    def with_lengths(self, lengths: np.ndarray) -> Report:
        """Returns the report of the same rows with these `[n]` or `[n, Q]` lengths."""
        real_tokens = int(lengths.sum())
        less = (self.real_tokens - real_tokens) / max(self.padded_tokens, 1)
        return dataclasses.replace(
            self,
            real_tokens=real_tokens,
            padding=self.padding + less,
            padding_in_rows=self.padding_in_rows + less,
            sequence_tokens=tokens_by_name(self.sequence_tokens, lengths.sum(axis=0)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python values."""
        numbers = dataclasses.asdict(self)
        if self.packed_examples:
            numbers["mask_bytes"] = self.mask_bytes
        if self.sequence_tokens:
            numbers["sequence_padding"] = self.sequence_padding
        return numbers

    def __rich__(self) -> Any:
        """Returns the report as a `rich` table, for a terminal."""
        what = "rows" if self.packed_examples else "examples"
        t = [f"T of\n{name}" for name in self.sequence_tokens or ()] or ["T"]
        names = ["B", *t, what, "moved\nin", "batches", "empty\nrows", "padding"]
        names.append(f"share of\n{self.unit}")
        if self.cost_unit != "tokens":
            names.append(f"share of\n{'time' if self.cost_unit == 's' else 'cost'}")
        rows = (
            (
                *(str(b.batch_size), *map(str, each_size(b.seq_len))),
                *(f"{n:,}" for n in (b.examples, b.carried, b.batches, b.empty_rows)),
                *(f"{b.padding:.1%}", f"{b.token_share:.1%}", f"{b.cost_share:.1%}"),
            )
            for b in self.buckets
        )
        rows = (row[: len(names)] for row in rows)
        return number_table(names, rows, "\n".join([self.summary, *self.legends]))

    @property
    def legends(self) -> tuple[str, ...]:
        what = "rows" if self.packed_examples else "examples"
        shape = f"of T {self.unit}"
        meaning = f"{what} that fit in no shorter bucket"
        if self.sequence_tokens:
            shape = f"with T {self.unit} for each sequence"
            rows = "that" if what == "rows" else "whose rows"
            meaning = f"{what} {rows} cost the least in this bucket"
        text = (
            f"A batch has B rows {shape}. {what.capitalize()}: {meaning}. Moved in: "
            f"{what} from shorter buckets that fill up a batch. Empty rows: rows "
            f"without an example. Padding: the share in the bucket's own {what}; the "
            f"total also includes empty rows and moved {what}. Share of {self.unit}: "
            "share of all positions, padding included."
        )
        if self.cost_unit != "tokens":
            cost = "time" if self.cost_unit == "s" else "cost"
            text += f" Share of {cost}: share of the predicted {cost} of an epoch."
        return (text,)

    @property
    def padding_shares(self) -> tuple[str, str, str]:
        """The padding, its part in rows and its part in empty rows, as percentages.

        They are rounded such that the parts add up to the total.
        """
        total, empty = f"{self.padding:.1%}", f"{self.padding_in_empty_rows:.1%}"
        in_rows = float(total[:-1]) - float(empty[:-1])
        return total, f"{in_rows:.1f}%", empty

    @property
    def summary(self) -> str:
        """The totals in a few sentences."""
        total, in_rows, empty = self.padding_shares
        lines = [
            f"{self.steps_per_epoch:,} steps per epoch, {self.real_tokens:,} real "
            f"{self.unit} in {self.padded_tokens:,}.",
            f"{total} padding: {in_rows} in rows, {empty} in empty rows.",
        ]
        if self.sequence_tokens:
            shares = self.sequence_padding.items()
            each = ", ".join(f"{share:.1%} of {name}" for name, share in shares)
            lines.append(f"Padding by sequence: {each}.")
        if self.cost_unit != "tokens":
            cost = format_cost(self.epoch_cost, self.cost_unit)
            lines.append(f"Predicted epoch: {cost}.")
        for number, what in (
            (self.left_over_examples, "do not fill a batch and are left out"),
            (self.dropped_examples, "are too long and are dropped"),
            (self.unselected_examples, "are not in the subset"),
            (
                self.truncated_examples,
                f"are too long and are truncated; {self.truncated_tokens:,} "
                f"{self.unit} are lost in total",
            ),
            (
                self.split_examples,
                f"are too long and are split into {self.chunks:,} chunks",
            ),
            (
                self.packed_examples,
                f"are packed in {self.examples:,} rows; a boolean attention mask takes "
                f"up to {self.mask_bytes / 2**20:,.1f} MiB",
            ),
        ):
            if number:
                lines.append(f"{number:,} examples {what}.")
        if self.repeated_rows:
            lines.append(f"{self.repeated_rows:,} empty rows repeat examples.")
        lines += self.wasteful_limits
        return "\n".join(lines)


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
        buckets=_bucket_reports(plan, flow, batches, tokens, padded),
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
        wasteful_limits=tuple(_wasteful_limits(plan, flow, padded, together)),
        **tally.changes,
    )


def _steps(
    plan: BucketPlan, flow: RowFlow, accumulate: int, together: int
) -> tuple[int, np.ndarray]:
    """Returns the steps of an epoch, and the batches of each bucket, `[K]` integers."""
    steps = -(-flow.num_batches * together // accumulate)
    batches = flow.batches * together
    # Empty batches complete the last step.
    batches[plan.filler] += steps * accumulate - batches.sum()
    return steps, batches


def _wasteful_limits(
    plan: BucketPlan, flow: RowFlow, padded: int, together: int
) -> Iterator[str]:
    """Yields a sentence about each limit of the plan that its examples do not need."""
    largest = plan.largest_batch
    if isinstance(plan.max_tokens, int) and largest * _MUCH_LESS <= plan.max_tokens:
        yield (
            f"No batch has more than {largest:,} of the {plan.max_tokens:,} positions "
            "that `max_tokens` allows."
        )
    multiple = plan.batch_size_multiple
    is_least = (plan.batch_sizes == multiple) & (flow.batches == 1)
    rows = (multiple * together - flow.rows) * plan.tokens_per_row
    empty = int(rows[is_least].sum())
    if empty > _MUCH * padded:
        yield (
            f"{empty / padded:.1%} of the positions are empty rows of buckets with "
            f"fewer examples than `batch_size_multiple={multiple}`."
        )


def _bucket_reports(
    plan: BucketPlan,
    flow: RowFlow,
    batches: np.ndarray,
    tokens: np.ndarray,
    padded: int,
) -> tuple[BucketReport, ...]:
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
            token_share=number * bucket.num_tokens / max(padded, 1),
            cost_share=number * cost / all_costs,
        )
        for bucket, examples, carried, rows, left_over, number, real, cost in zip(
            plan.buckets, *columns, strict=True
        )
    )


def _padding_share(positions: int, tokens: float) -> float:
    return (positions - tokens) / max(positions, 1)


def tokens_by_name(
    names: Iterable[str] | None, tokens: np.ndarray
) -> dict[str, int] | None:
    """Returns the tokens `[Q]` of sequences by name; None without names."""
    if not names:
        return None
    return dict(zip(names, tokens.tolist(), strict=True))
