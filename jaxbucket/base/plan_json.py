"""Reads and writes the fields of a `BucketPlan` as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from jaxbucket.base.sizes import PerSequence

if TYPE_CHECKING:
    from jaxbucket.base.buckets import BucketPlan

_HEADER = {"format": "jaxbucket.BucketPlan", "version": 1}


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
    """
    fields = json.loads(text)
    if not isinstance(fields, dict) or not fields.items() >= _HEADER.items():
        raise ValueError(
            f"The JSON is no plan with {_HEADER}. Write it again with `plan.to_json()`."
        )
    plan = {name: fields[name] for name in fields.keys() - {*_HEADER, "notes"}}
    wrong = plan.keys() ^ set(names)
    pairs = plan.get("buckets")
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in pairs
    ):
        wrong |= {"buckets"}
    if wrong:
        raise ValueError(
            f"The plan has missing, unknown or invalid fields, {sorted(wrong)}. It has "
            f"{names}, with buckets [B, T]; anything else goes into 'notes'."
        )
    return plan
