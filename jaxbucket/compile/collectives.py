"""Counts the collectives of a compiled program, by reading its text.

XLA's partitioner inserts collectives after jax has lowered a program, so that only the
executable knows them: `all-reduce` for gradients, `all-gather` for sharded parameters,
`all-to-all` for rows that several devices share.
"""

from __future__ import annotations

import collections
import functools
import math
import operator
import re
from itertools import starmap
from typing import TypedDict

_KINDS = (
    *("all-gather", "all-reduce", "all-to-all", "collective-broadcast"),
    *("collective-permute", "ragged-all-to-all", "reduce-scatter"),
)
_START = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
# The type of an instruction's result, and its name.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")
# The computation that it runs, or several of which it runs one.
_CALLED = re.compile(
    r"(?:calls|to_apply|body|(?:true|false)_computation|branch_computations)="
    r"(\{[^}]*\}|[%\w.\-]+)"
)
_TRIP_COUNT = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


class Collective(TypedDict):
    """All collectives of one kind that a run of a program executes on a device.

    Attributes:
      count: their number.
      bytes: the size of their results.
      is_lower_bound: whether some are in a loop of unknown length, counted once.
    """

    count: int
    bytes: int
    is_lower_bound: bool


def count_collectives(text: str) -> dict[str, Collective]:
    """Returns kind -> the collectives of that kind, such as "all-reduce".

    The body of a loop counts once per iteration if the compiler knows their number,
    and a conditional as the largest of its branches.

    Example:
      >>> text = '''
      ... %body (p: f32[8]) -> f32[8] {
      ...   %r = f32[8]{0} all-reduce(%p), to_apply=%add
      ... }
      ... ENTRY %main (x: f32[8]) -> f32[8] {
      ...   %w = f32[8] while(%x), body=%body, known_trip_count":{"n":"3"}
      ... }'''
      >>> count_collectives(text)
      {'all-reduce': {'count': 3, 'bytes': 96, 'is_lower_bound': False}}

    Args:
      text: the optimized HLO of an executable, from `compiled.as_text()`.
    """
    lines: dict[str, list[str]] = collections.defaultdict(list)
    name = entry = ""
    for line in text.splitlines():
        if start := _START.match(line):
            name = start[1]
            entry = name if line.startswith("ENTRY") else entry
        elif name:
            lines[name].append(line)

    empty: collections.Counter[tuple[str, str]] = collections.Counter()

    @functools.cache
    def counted(computation: str) -> collections.Counter[tuple[str, str]]:
        total = empty.copy()
        for line in lines[computation]:
            instruction = _INSTRUCTION.match(line)
            if instruction is None:
                continue
            result, operation = instruction.groups()
            # The start of an asynchronous operation returns its operands, too.
            kind = operation.removesuffix("-done")
            if kind in _KINDS:
                total[kind, "count"] += 1
                total[kind, "bytes"] += sum(starmap(_bytes, _ARRAY.findall(result)))
            # All of its parts name what it calls.
            if operation.endswith(("-done", "-update")):
                continue
            called = re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(line)))
            # Of branches, the largest; most instructions call a single computation.
            inner = functools.reduce(operator.or_, map(counted, called), empty)
            trips = _TRIP_COUNT.search(line)
            for (kind, what), value in inner.items():
                total[kind, what] += value * int(trips[1] if trips else 1)
                if operation == "while" and not trips:
                    total[kind, "unknown"] += 1
        return total

    total = counted(entry)
    return {
        kind: Collective(
            count=total[kind, "count"],
            bytes=total[kind, "bytes"],
            is_lower_bound=bool(total[kind, "unknown"]),
        )
        for kind in sorted({kind for kind, _ in total})
    }


def _bytes(dtype: str, sizes: str) -> int:
    """Returns the size of an array of a type such as f32, f8e4m3fn or pred."""
    digits = re.search(r"\d+", dtype)
    bits = 8 if dtype == "pred" else int(digits[0]) if digits else 0
    return bits * math.prod(int(size) for size in sizes.split(",") if size) // 8
