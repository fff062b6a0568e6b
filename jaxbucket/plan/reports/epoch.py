"""Statistics of one epoch of a plan: padding, tokens, steps, cost, lost examples."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import (
    check_accumulate,
    check_choice,
    check_lengths,
)
from jaxbucket.base.lengths import total_lengths
from jaxbucket.base.policies import GROUPS, Group
from jaxbucket.base.table import table_text
from jaxbucket.plan.chunks import chunk_lengths, last_chunks
from jaxbucket.plan.flow.epoch import epoch_flow
from jaxbucket.plan.flow.remainder import (
    Remainder,
    RowFlow,
    epoch_cost,
    filler_bucket,
)
from jaxbucket.plan.formatting import format_cost, number_table


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
class Report:
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
      dropped_examples: examples left out because they are too long.
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
      autocorrelation: correlation between the T of consecutive batches, from -1 to 1;
        near 0 in a shuffled epoch. None if the order is unknown or T is constant.
      unit: the unit of lengths in tables and plots, such as "bytes".
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
    split_examples: int = 0
    chunks: int = 0
    packed_examples: int = 0
    autocorrelation: float | None = None
    unit: str = "tokens"

    @property
    def mask_bytes(self) -> int:
        return max(x.batch_size * _squares(x.seq_len) for x in self.buckets)

    def with_real_tokens(self, real_tokens: int) -> Report:
        """Returns the report of the same rows with `real_tokens` real tokens."""
        less = (self.real_tokens - real_tokens) / max(self.padded_tokens, 1)
        return dataclasses.replace(
            self,
            real_tokens=real_tokens,
            padding=self.padding + less,
            padding_in_rows=self.padding_in_rows + less,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python values."""
        mask = {"mask_bytes": self.mask_bytes} if self.packed_examples else {}
        return dataclasses.asdict(self) | mask

    def to_json(self) -> str:
        """Returns all numbers as one JSON object."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        """Returns the table that `jaxbucket report` prints, as text."""
        return table_text(self)

    def __rich__(self) -> Any:
        """Returns the report as a `rich` table, for a terminal."""
        what = "rows" if self.packed_examples else "examples"
        names = ["B", "T", what, "moved\nin", "batches", "empty\nrows", "padding"]
        names.append(f"share of\n{self.unit}")
        if self.cost_unit != "tokens":
            names.append(f"share of\n{'time' if self.cost_unit == 's' else 'cost'}")
        rows = (
            (
                *(str(b.batch_size), _size_text(b.seq_len)),
                *(f"{n:,}" for n in (b.examples, b.carried, b.batches, b.empty_rows)),
                *(f"{b.padding:.1%}", f"{b.token_share:.1%}", f"{b.cost_share:.1%}"),
            )
            for b in self.buckets
        )
        rows = (row[: len(names)] for row in rows)
        return number_table(names, rows, f"{self.summary}\n{self._legend(what)}")

    def _legend(self, what: str) -> str:
        """Returns an explanation of the columns of the table.

        Args:
          what: the things in rows, "examples" or "rows".
        """
        text = (
            f"A batch has B rows of T {self.unit}. {what.capitalize()}: {what} that "
            f"fit in no shorter bucket. Moved in: {what} from shorter buckets that "
            "fill up a batch. Empty rows: rows without an example. Padding: the share "
            f"in the bucket's own {what}; the total also includes empty rows and moved "
            f"{what}. "
            f"Share of {self.unit}: share of all positions, padding included."
        )
        if self.cost_unit != "tokens":
            cost = "time" if self.cost_unit == "s" else "cost"
            text += f" Share of {cost}: share of the predicted {cost} of an epoch."
        return text

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
        if self.cost_unit != "tokens":
            cost = format_cost(self.epoch_cost, self.cost_unit)
            lines.append(f"Predicted epoch: {cost}.")
        if self.left_over_examples:
            lines.append(
                f"{self.left_over_examples:,} examples do not fill a batch and are "
                "left out of each epoch."
            )
        if self.dropped_examples:
            lines.append(
                f"{self.dropped_examples:,} examples are too long and are dropped."
            )
        if self.truncated_examples:
            lines.append(
                f"{self.truncated_examples:,} examples are too long and are truncated; "
                f"{self.truncated_tokens:,} {self.unit} are lost in total."
            )
        if self.split_examples:
            lines.append(
                f"{self.split_examples:,} examples are too long and are split into "
                f"{self.chunks:,} chunks."
            )
        if self.packed_examples:
            lines.append(
                f"{self.packed_examples:,} examples are packed in {self.examples:,} "
                "rows; a boolean attention mask takes up to "
                f"{self.mask_bytes / 2**20:,.1f} MiB."
            )
        if self.autocorrelation is not None:
            lines.append(
                f"Autocorrelation of T from batch to batch: {self.autocorrelation:.3f}."
            )
        return "\n".join(lines)


def report(
    plan: BucketPlan,
    lengths: ArrayLike,
    *,
    remainder: Remainder = "cheapest",
    accumulate: int = 1,
    group: Group = "same",
) -> Report:
    """Returns the exact numbers of one epoch of a plan on a set of lengths.

    If remainders are dropped, the number of real tokens is the mean over all choices of
    the dropped examples.

    Example:
      >>> from jaxbucket import Bucket
      >>> plan = BucketPlan((Bucket(4, 8), Bucket(2, 16)), max_tokens=32)
      >>> print(report(plan, [8, 8, 8, 8, 6, 10]).summary)
      2 steps per epoch, 48 real tokens in 64.
      25.0% padding: 25.0% in rows, 0.0% in empty rows.

    Args:
      plan: the shapes.
      lengths: `[N]` integers, one per example: the lengths that the plan was made for,
        or others. Under `overlong="split"`, one per example or one per chunk.
      remainder: what happens to examples that do not fill a batch: "cheapest" moves
        them to longer buckets if that costs less, "promote" always moves them, "pad"
        leaves them in batches with empty rows, and "drop" leaves them out.
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
    # Full chunks are only counted, because their lengths may not fit in memory.
    rows, full = lengths, 0
    if plan.overlong == "split":
        lengths = check_lengths(lengths)
        rows, full = last_chunks(lengths, plan.max_seq_len)
    rows = plan.check(rows)
    index = plan.assign(rows)
    totals, used = total_lengths(rows), total_lengths(plan.truncated(rows))
    counts, tokens = _by_bucket(plan, index, used)
    counts[-1] += full
    tokens[-1] += full * int(plan.tokens_per_row[-1])
    # The batches of a step that have the same bucket are filled together.
    together = accumulate if group == "same" else 1
    flow = epoch_flow(plan, counts, remainder, together)
    steps = -(-flow.num_batches * together // accumulate)
    batches = flow.batches * together
    # Empty batches complete the last step.
    filler = plan.buckets.index(filler_bucket(plan))
    batches[filler] += steps * accumulate - batches.sum()
    shares = 1 - flow.dropped / np.maximum(counts, 1)
    real = round(float((tokens * shares).sum()))
    padded = int(epoch_cost(batches, plan.batch_sizes * plan.tokens_per_row))
    in_rows = int(epoch_cost(flow.rows, plan.tokens_per_row))
    lost = (totals - used)[(index >= 0) & (used < totals)]
    split = int(np.count_nonzero(np.asarray(lengths) > plan.max_seq_len)) if full else 0
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
        dropped_examples=int(np.count_nonzero(index < 0)),
        truncated_examples=len(lost),
        truncated_tokens=int(lost.sum()),
        epoch_cost=epoch_cost(batches, plan.costs),
        cost_unit=plan.cost_unit,
        split_examples=split,
        chunks=split + full,
    )


def row_lengths(plan: BucketPlan, lengths: np.ndarray) -> np.ndarray:
    """Returns the lengths of rows: those of chunks if the plan splits examples."""
    if plan.overlong != "split":
        return lengths
    return chunk_lengths(lengths, plan.max_seq_len)


def _by_bucket(
    plan: BucketPlan, index: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns each bucket's number of examples `[K]` and their tokens `[K]`.

    Args:
      plan: the shapes.
      index: `[N]` integers, the bucket of each example, -1 for one that is dropped.
      lengths: `[N]` integers, the tokens of each example.
    """
    counts = np.bincount(index + 1, minlength=len(plan) + 1)
    tokens = np.bincount(index + 1, weights=lengths, minlength=len(plan) + 1)
    return counts[1:], tokens[1:]


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


def lag1_autocorrelation(values: np.ndarray) -> float | None:
    """Returns the correlation of consecutive values, from -1 to 1.

    Box and Jenkins, "Time Series Analysis", 1970: the sum of the products of
    neighbors' deviations from the mean, divided by the sum of the squared deviations.

    Example:
      >>> lag1_autocorrelation(np.array([1, 2, 1, 2]))
      -0.75

    Args:
      values: `[N]` numbers.

    Returns:
      The correlation, or None if all values are equal.
    """
    deviations = values - values.mean()
    variance = float((deviations**2).sum())
    if not variance:
        return None
    return float((deviations[1:] * deviations[:-1]).sum()) / variance


def _squares(seq_len: int | dict[str, int]) -> int:
    sizes = seq_len.values() if isinstance(seq_len, dict) else [seq_len]
    return sum(size**2 for size in sizes)


def _size_text(seq_len: int | dict[str, int]) -> str:
    sizes = seq_len.values() if isinstance(seq_len, dict) else [seq_len]
    return " + ".join(map(str, sizes))
