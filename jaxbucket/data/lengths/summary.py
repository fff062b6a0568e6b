"""Summary statistics of a set of lengths."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import check_lengths


@dataclasses.dataclass(frozen=True)
class LengthSummary:
    """Summary statistics of lengths. The percentiles are not interpolated.

    Attributes:
      examples: number of examples.
      unit: unit of the lengths.
      total: sum of the lengths.
      min: minimum length.
      median: median length.
      mean: mean length.
      p90: 90th percentile.
      p99: 99th percentile.
      max: maximum length.
      distinct: number of distinct lengths.
    """

    examples: int
    unit: str
    total: int
    min: int
    median: int
    mean: float
    p90: int
    p99: int
    max: int
    distinct: int

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as plain Python values."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Returns all fields as a JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    def __rich__(self) -> Any:
        """Returns the summary as a `rich` table for a terminal."""
        return _table({f"in {self.unit}": self})


@dataclasses.dataclass(frozen=True)
class SequenceSummary:
    """Summary statistics of the lengths of several sequences.

    Attributes:
      sequences: the statistics of each sequence, by name.
    """

    sequences: dict[str, LengthSummary]

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields of each summary as plain Python values."""
        return {name: summary.to_dict() for name, summary in self.sequences.items()}

    def __rich__(self) -> Any:
        """Returns a `rich` table with a column for each sequence."""
        return _table({f"{x}\nin {s.unit}": s for x, s in self.sequences.items()})


def _table(columns: dict[str, LengthSummary]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("lengths", justify="left")
    for title in columns:
        table.add_column(Text(title), justify="right")
    fields = [field.name for field in dataclasses.fields(LengthSummary)]
    for name in fields:
        if name != "unit":
            values = [_formatted(getattr(x, name)) for x in columns.values()]
            table.add_row(_ROW_NAMES.get(name, name), *values)
    return table


_ROW_NAMES = {"distinct": "distinct lengths"}


def _formatted(value: float) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def summarize_lengths(lengths: ArrayLike, unit: str = "tokens") -> LengthSummary:
    """Returns summary statistics of lengths.

    Example:
      >>> summary = summarize_lengths([1, 2, 2, 15])
      >>> summary.median, summary.mean, summary.p90, summary.distinct
      (2, 5.0, 15, 3)

    Args:
      lengths: `[N]` integers.
      unit: unit of the lengths.

    Raises:
      ValueError: if there are none, or a length is not from 1 to 2**31 - 1.
    """
    ordered = np.sort(check_lengths(lengths))
    size, total = len(ordered), int(ordered.sum(dtype=np.int64))
    median, p90, p99 = (int(ordered[-(-size * x // 100) - 1]) for x in (50, 90, 99))
    return LengthSummary(
        examples=size,
        unit=unit,
        total=total,
        min=int(ordered[0]),
        median=median,
        mean=total / size,
        p90=p90,
        p99=p99,
        max=int(ordered[-1]),
        distinct=1 + int(np.count_nonzero(np.diff(ordered))),
    )
