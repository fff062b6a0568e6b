"""`PackedPlan`: padded or packed rows, and what each of them costs."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias, get_args

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.table import Record, format_cost, number_table
from jaxbucket.packing.rows import Packing
from jaxbucket.plan.reports.epoch_report import Report, sizes

Pack: TypeAlias = Literal["auto", "always", "never"]
PACK_CHOICES: tuple[str, ...] = get_args(Pack)


@dataclasses.dataclass(frozen=True, eq=False)
class PackedPlan(Record):
    """A bucket plan and, if rows are packed, the packing for it.

    Attributes:
      plan: the buckets, with the cost of their steps.
      packing: rows of several examples; None if every row has one example.
      report: the report of one epoch.
      epoch_costs: the cost of an epoch for each alternative, "padded", "packed" and
        "packed in one T", in `plan.cost_unit`.
      rows: the number of rows of each bucket, before remainders are promoted.
      segments: the mean number of examples in a row of each bucket.
      block_sparse: whether attention was assumed to take time within examples only.
      cause: why rows are packed or padded, as a clause.
      counts_attention: whether the cost may include attention, unlike `TokenCost`.
    """

    plan: BucketPlan
    packing: Packing | None
    report: Report
    epoch_costs: dict[str, float]
    rows: tuple[int, ...]
    segments: tuple[float, ...]
    block_sparse: bool = False
    cause: str = ""
    counts_attention: bool = True

    @property
    def is_packed(self) -> bool:
        """Whether rows have several examples."""
        return self.packing is not None

    @property
    def reason(self) -> str:
        """The choice and the costs behind it, as sentences."""
        name = "packed" if self.is_packed else "padded"
        return (
            f"Rows are {name}, because {self.cause}. Cost of an epoch: "
            f"{self._costs}.{self._attention}"
        )

    @property
    def _costs(self) -> str:
        unit, costs = self.plan.cost_unit, self.epoch_costs
        padded, packed, single = (
            format_cost(costs[name], unit)
            for name in ("padded", "packed", "packed in one T")
        )
        return f"{padded} padded, {packed} packed, {single} packed with a single T"

    @property
    def _attention(self) -> str:
        """How the cost counts attention, as a sentence after a space, or nothing."""
        if not self.counts_attention:
            return ""
        attention = "within examples" if self.block_sparse else "over whole rows"
        return f" Attention in packed rows is counted {attention}."

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python objects."""
        return {
            "packed": self.is_packed,
            "block_sparse": self.block_sparse,
            "epoch_costs": self.epoch_costs,
            "rows": list(self.rows),
            "segments_per_row": list(self.segments),
            "cause": self.cause,
            "report": self.report.to_dict(),
        }

    def __rich__(self) -> Any:
        """Returns a `rich` table for the terminal."""
        names = [f"T of {name}" for name in self.plan.sequences] or ["T"]
        names = ["B", *names, "rows", "examples per row", "padding", "cost"]
        columns = self.rows, self.segments, self.report.buckets
        lines = (
            (
                *(str(b.batch_size), *map(str, sizes(b.seq_len))),
                *(str(rows), f"{segments:.1f}"),
                *(f"{b.padding:.1%}", f"{b.cost_share:.1%}"),
            )
            for rows, segments, b in zip(*columns, strict=True)
        )
        return number_table(names, lines, self.reason)
