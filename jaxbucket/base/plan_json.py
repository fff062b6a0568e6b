"""Reads and writes the fields of a `BucketPlan` as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from jaxbucket.base.sizes import PerSequence

if TYPE_CHECKING:
    from jaxbucket.base.buckets import BucketPlan

_HEADER = {"format": "jaxbucket.BucketPlan", "version": 1}
_REMEDY = "Write the plan again with `plan.to_json()`."


def write(plan: BucketPlan) -> str:
    """Returns the JSON of a plan."""
    fields = {
        field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)
    }
    fields["buckets"] = [bucket.to_list() for bucket in plan.buckets]
    values = {
        x: dict(y) if isinstance(y, PerSequence) else y for x, y in fields.items()
    }
    return json.dumps({**_HEADER, **values})


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
    if not isinstance(fields, dict) or any(
        fields.get(x) != _HEADER[x] for x in _HEADER
    ):
        raise ValueError(f"The JSON is no plan with {_HEADER}. {_REMEDY}")
    plan = {name: fields[name] for name in fields.keys() - {*_HEADER, "notes"}}
    if wrong := sorted(plan.keys() ^ set(names)):
        raise ValueError(
            f"The plan has fields that are missing or unknown: {wrong}. It must have "
            f"{names}; anything else goes into 'notes'."
        )
    pairs = plan["buckets"]
    if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
        raise ValueError(
            f"The plan's buckets are {pairs!r}, not a list of [B, T]. {_REMEDY}"
        )
    return plan


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2
