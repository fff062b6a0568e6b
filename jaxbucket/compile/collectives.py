"""Counts the collectives of a compiled program, by reading its text.

XLA's partitioner inserts collectives after jax has lowered a program, so that only the
executable knows them: `all-reduce` for gradients, `all-gather` for sharded parameters,
`all-to-all` for rows that several devices share.
"""

from __future__ import annotations

import collections
import functools
import operator
import re
from typing import Any, TypedDict

_KINDS = (
    *("all-gather", "all-reduce", "all-to-all", "collective-broadcast"),
    *("collective-permute", "ragged-all-to-all", "reduce-scatter"),
)
_START = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
# The type of an instruction's result, and its name.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
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
            kind = operation.removesuffix("-start")
            if kind in _KINDS:
                total[kind, "count"] += 1
                total[kind, "bytes"] += _result_bytes(result, operation)
            # The other parts of an asynchronous operation name it again.
            if operation.endswith(("-done", "-update")):
                continue
            # Of branches, the largest; most instructions call a single computation.
            inner = functools.reduce(operator.or_, map(counted, _called(line)), empty)
            _add(total, inner, line, is_loop=operation == "while")
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


def _add(
    total: collections.Counter[tuple[str, str]], inner: Any, line: str, *, is_loop: bool
) -> None:
    """Adds the collectives of a computation that an instruction calls."""
    trips = _TRIP_COUNT.search(line) if is_loop else None
    for (kind, what), value in inner.items():
        total[kind, what] += value * int(trips[1] if trips else 1)
        if is_loop and trips is None:
            total[kind, "unknown"] += 1


def _called(line: str) -> list[str]:
    branches = _BRANCHES.search(line)
    names = re.findall(r"[\w.\-]+", branches[1]) if branches else []
    return names + _CALLED.findall(line)


def _result_bytes(result: str, operation: str) -> int:
    """Returns the size of a type such as `(f32[2]{0}, f32[8]{0}, u32[])`.

    The start of an asynchronous operation returns its operands, its results and more,
    but that of an `all-reduce` only its results before jax 0.12.
    """
    has_operands = operation != "all-reduce-start" or result.startswith("((")
    if operation.endswith("-start") and has_operands:
        result = _elements(result)[1]
    return sum(_array_bytes(*array) for array in _ARRAY.findall(result))


def _elements(result: str) -> list[str]:
    """Returns the types in a tuple, which may be tuples themselves."""
    elements, depth = [""], 0
    for character in result[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return elements if len(elements) > 1 else [result, result]


def _array_bytes(dtype: str, sizes: str) -> int:
    # Such as f32, bf16, f8e4m3fn and pred.
    digits = re.search(r"\d+", dtype)
    bits = 8 if dtype == "pred" else int(digits[0]) if digits else 0
    for size in filter(None, sizes.split(",")):
        bits *= int(size)
    return bits // 8
