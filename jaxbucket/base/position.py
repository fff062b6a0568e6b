"""The position of a run in its data, which a checkpoint stores next to the state."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxbucket.base.checks import check_integer

_FINGERPRINT = "fingerprint"
# The number of processes of a stream, None if it is unknown; absent for a schedule.
_PROCESSES = "processes"
# What only later steps depend on. Processes must agree on it, but it may change.
_LATER = "later"


@dataclasses.dataclass(frozen=True)
class DataPosition:
    """A step, and descriptions of the plan, the data and the schedule.

    A run resumes from its position at exactly the next batch, unless the plan, the data
    or the schedule has changed. Each description holds a "fingerprint", and a few
    entries that name the change in an error message, such as the number of examples.

    Attributes:
      step: the number of completed updates, which is also the next step.
      plan: a description of the shapes and the overlong policy.
      data: a description of the data: the number of examples and tokens, with a
        fingerprint of the lengths and of a few examples.
      schedule: the seed, the order and all other options.

    Raises:
      ValueError: if `step` is not an integer, or is negative.
    """

    step: int
    plan: Mapping[str, Any]
    data: Mapping[str, Any]
    schedule: Mapping[str, Any]

    def __post_init__(self):
        object.__setattr__(self, "step", check_integer("step", self.step, least=0))

    def to_dict(self) -> dict[str, Any]:
        """Returns the position as a dict for JSON; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Any) -> DataPosition:
        """Returns the position from the result of `to_dict`.

        Args:
          fields: the dict from `to_dict`.

        Raises:
          ValueError: if `fields` is not such a dict.
        """
        try:
            position = cls(**fields)
            prints = [x[_FINGERPRINT] for x in dataclasses.astuple(position)[1:]]
        except (TypeError, KeyError):
            prints = [None]
        if not all(isinstance(x, str) for x in prints):
            raise ValueError(
                f"{fields!r} is not a valid `DataPosition`. Pass the result of "
                "`position.to_dict()`."
            )
        return cls(**fields)

    def check_same(self, other: DataPosition) -> None:
        """Raises a ValueError if another position is not from the same run.

        Args:
          other: the position to compare with, at any step. The message names each entry
            of the plan, the data or the schedule that has changed.
        """
        by_part = {
            part: _changes(part, getattr(self, part), getattr(other, part))
            for part in ("plan", "data", "schedule")
        }
        # Options and data come before the buckets, which usually differ because
        # something else does, and then so do the costs of their steps.
        buckets = by_part["plan"].pop("buckets", None)
        if buckets and by_part["plan"].keys() - {"step_costs", "cost_unit"}:
            by_part["plan"].pop("step_costs", None)
        changes = [text for part in by_part.values() for text in part.values()]
        changes += filter(None, [buckets])
        if not changes:
            return
        if _PROCESSES in other.schedule:
            remedy = (
                "Streams resume only with the same number of processes. To change the "
                "plan at a later step, pass `plan={0: old, step: new}`."
            )
        else:
            remedy = (
                "To change the schedule at this step, use "
                f"`JoinedSchedule({{0: old, {self.step}: new}})`."
            )
        raise ValueError(
            f"Cannot resume at step {self.step}, because the plan, the data or the "
            f"schedule has changed (saved -> now): {'; '.join(changes)}. Restore the "
            f"previous settings, or save to a different folder. {remedy}"
        )


def entry_changes(
    part: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, str]:
    """Returns a description of each changed entry, without the fingerprints."""
    return {
        name: f"{part} {name.replace('_', ' ')} "
        f"{old.get(name, 'absent')} -> {new.get(name, 'absent')}"
        for name in {**old, **new}
        if name not in (_FINGERPRINT, _LATER)
        and not _is_same(old.get(name), new.get(name))
    }


def _changes(
    part: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, str]:
    """Returns a description of each changed entry in one part of a position."""
    changes = entry_changes(part, old, new)
    # The fingerprint of the schedule is computed from the other two and from its own
    # entries, so it adds no information.
    before, after = old[_FINGERPRINT], new[_FINGERPRINT]
    if part != "schedule" and not changes and before != after:
        changes[_FINGERPRINT] = f"{part} fingerprint {before[:8]} -> {after[:8]}"
    return changes


def _is_same(a: Any, b: Any) -> bool:
    """Returns whether two values have the same JSON, in which NaNs are equal."""
    first, second = (json.dumps(x, sort_keys=True, default=str) for x in (a, b))
    return first == second
