"""The position of a run in its data, which a checkpoint stores next to the state."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NoReturn

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
        step = check_integer("step", self.step)
        if step < 0:
            raise ValueError(f"`step={step}` must not be negative.")
        object.__setattr__(self, "step", step)

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
        names = [field.name for field in dataclasses.fields(cls)]
        parts = names[1:]
        if (
            not isinstance(fields, Mapping)
            or sorted(fields) != sorted(names)
            or not all(isinstance(fields[part], Mapping) for part in parts)
            or not all(isinstance(fields[p].get(_FINGERPRINT), str) for p in parts)
        ):
            raise ValueError(
                f"{fields!r} is not a valid `DataPosition`. Pass the result of "
                "`position.to_dict()`."
            )
        return cls(fields["step"], *(fields[part] for part in parts))

    def check_same(self, other: DataPosition) -> None:
        """Raises a ValueError if another position is not from the same run.

        Args:
          other: the position to compare with, at any step. The message names each entry
            of the plan, the data or the schedule that has changed.
        """
        lacking = other.schedule.keys() & {_PROCESSES, _LATER} - self.schedule.keys()
        if lacking:
            raise ValueError(
                f"Cannot resume at step {self.step}, because the position has no "
                f"{sorted(lacking)}: it is of another kind of data, or of an earlier "
                "version of jaxbucket. Resume with the data and the version that saved "
                "it, or save to a different folder."
            )
        changes = self.changes(other)
        if not changes:
            return
        if _PROCESSES in other.schedule:
            self._refuse_stream(other, changes)
        raise ValueError(
            f"Cannot resume at step {self.step}, because the plan, the data or the "
            f"schedule has changed (saved -> now): {'; '.join(changes)}. Restore the "
            "previous settings, save to a different folder, or change the schedule at "
            f"this step with `JoinedSchedule({{0: old, {self.step}: new}})`."
        )

    def _refuse_stream(self, other: DataPosition, changes: list[str]) -> NoReturn:
        """Raises a ValueError for a stream, whose remedies are others."""
        before, now = self.schedule[_PROCESSES], other.schedule[_PROCESSES]
        if before != now:
            raise ValueError(
                f"Cannot resume at step {self.step}, because the stream was read by "
                f"{before} processes, and now by {now}. Streams resume only with the "
                "same number of processes."
            )
        remedies = ["Restore the previous settings, or save to a different folder."]
        if "plans" in _changes("schedule", self.schedule, other.schedule):
            remedies.append(
                "To change the plan at a later step, pass `plan={0: old, step: new}`."
            )
        raise ValueError(
            f"Cannot resume at step {self.step}, because the plan, the lengths or the "
            f"options have changed (saved -> now): {'; '.join(changes)}. "
            f"{' '.join(remedies)}"
        )

    def changes(self, other: DataPosition) -> list[str]:
        """Returns a description of each entry that differs in another position.

        It is empty if both are positions of the same run. Options and data come before
        the buckets.

        Args:
          other: the position to compare with, at any step.
        """
        changes = {
            part: _changes(part, getattr(self, part), getattr(other, part))
            for part in ("plan", "data", "schedule")
        }
        # The buckets usually differ because something else does, and then so do the
        # costs of their steps.
        buckets = changes["plan"].pop("buckets", None)
        if buckets and changes["plan"].keys() - {"step_costs", "cost_unit"}:
            changes["plan"].pop("step_costs", None)
        texts = [text for part in changes.values() for text in part.values()]
        return [*texts, buckets] if buckets else texts


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
    """Returns whether two values are equal or have the same JSON, like two NaNs."""
    try:
        if a == b:
            return True
    except ValueError:
        # The comparison of an array is an array, which is neither true nor false.
        pass
    return _as_json(a) == _as_json(b)


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def check_position(position: Any) -> None:
    """Raises a ValueError unless `position` is a `DataPosition`."""
    if not isinstance(position, DataPosition):
        raise ValueError(
            f"`position` is a {type(position).__name__}, not a `DataPosition`. "
            "Pass a position from `Checkpoints.restore` or `MeshLoader.position`."
        )
