"""Reads and writes the fields of a `BucketPlan` as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from jaxbucket.base.sizes import PerSequence

if TYPE_CHECKING:
    from jaxbucket.base.buckets import BucketPlan

_FORMAT = "jaxbucket.BucketPlan"
# Plans with several sequences are written as version 3, others with step costs as
# version 2, and all others still as version 1.
_VERSIONS = (1, 2, 3)
_REMEDY = "Write the plan again with `plan.to_json()`."
# The fields that some versions leave out.
_OPTIONAL = ("step_costs", "cost_unit", "packed")


def write(plan: BucketPlan) -> str:
    """Returns the JSON of a plan."""
    fields: dict[str, Any] = {
        "format": _FORMAT,
        "version": 3 if plan.sequences else 1 if plan.step_costs is None else 2,
        "buckets": [bucket.to_list() for bucket in plan.buckets],
        "max_tokens": plan.max_tokens,
        "batch_size_multiple": plan.batch_size_multiple,
        "seq_len_multiple": plan.seq_len_multiple,
        "overlong": plan.overlong,
    }
    if plan.step_costs is not None:
        fields |= {"step_costs": plan.step_costs, "cost_unit": plan.cost_unit}
    if plan.packed:
        fields["packed"] = True
    return json.dumps(
        {x: dict(y) if isinstance(y, PerSequence) else y for x, y in fields.items()}
    )


def read(text: str, names: list[str]) -> dict[str, Any]:
    """Returns the fields that `write` wrote; buckets are lists `[B, T]`.

    A field "notes" may have been added, and is ignored.

    Args:
      text: the JSON object.
      names: the fields of a plan.

    Raises:
      ValueError: if `text` is not valid JSON, does not hold a plan, or holds one of an
        unknown version or with unknown fields.
    """
    try:
        fields = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"The plan is not valid JSON ({error}). {_REMEDY}") from None
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise ValueError(f'The JSON has no "format": "{_FORMAT}". {_REMEDY}')
    version = fields.get("version")
    if version not in _VERSIONS or isinstance(version, bool):
        raise ValueError(
            f"The plan has version {version!r}; this jaxbucket reads versions "
            f"{_VERSIONS[0]} to {_VERSIONS[-1]}. {_REMEDY}"
        )
    known = ("format", "version", "notes", *names)
    if unknown := [name for name in fields if name not in known]:
        raise ValueError(
            f"The plan has the unknown fields {unknown}. Correct their names, which "
            f"are among {list(known)}, or move them into 'notes'."
        )
    absent = {name for name in _OPTIONAL if name not in fields}
    if version == 1:
        absent |= {"step_costs", "cost_unit"}
    if version == 2:
        absent -= {"step_costs", "cost_unit"}
    try:
        plan = {name: fields[name] for name in names if name not in absent}
    except KeyError as error:
        raise ValueError(f"The plan has no field {error}. {_REMEDY}") from None
    pairs = plan["buckets"]
    if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
        raise ValueError(
            f"The plan's buckets are {pairs!r}, not a list of [B, T]. {_REMEDY}"
        )
    return plan


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2
