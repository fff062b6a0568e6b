"""Where in its data a run is: what a checkpoint keeps beside the state."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxbucket.base.checks import check_integer

_FINGERPRINT = "fingerprint"


@dataclasses.dataclass(frozen=True)
class DataPosition:
    """A step, and what is trained on: enough to go on with the very next batch.

    Each part has its own "fingerprint", which decides, beside a few numbers that can
    be named when it has changed.

    Attributes:
      step: updates done, which is the step to go on with.
      plan: the shapes and the policy.
      data: how many examples and tokens; lengths and samples of the contents.
      schedule: the seed and the order, and what the schedule continues, if anything.

    Raises:
      ValueError: if `step` is no integer, or negative.
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
        """Returns plain Python, for JSON; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Any) -> DataPosition:
        """Reads what `to_dict` returned.

        Raises:
          ValueError: if it is something else.
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
                f"{fields!r} is no `DataPosition`. Pass what `position.to_dict()` gave."
            )
        return cls(fields["step"], *(fields[part] for part in parts))

    def check_same(self, now: DataPosition) -> None:
        """Raises a ValueError that names every change, if `now` is of another run."""
        changes = [
            change
            for part in ("plan", "data", "schedule")
            for change in _changes(part, getattr(self, part), getattr(now, part))
        ]
        if changes:
            raise ValueError(
                f"Cannot go on at step {self.step}, for what is trained on has "
                f"changed: {'; '.join(changes)}. Give back what it was, or go on "
                "deliberately with `schedule.continue_with(position)`."
            )


def _changes(part: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changes = [
        f"{part} {name.replace('_', ' ')} "
        f"{was.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in {**was, **now}
        if name != _FINGERPRINT and not is_same(was.get(name), now.get(name))
    ]
    # That of the schedule is made of the two others and of what is named here.
    if part != "schedule" and not changes:
        before, after = was[_FINGERPRINT], now[_FINGERPRINT]
        if before != after:
            changes = [f"{part} fingerprint {before[:8]} -> {after[:8]}"]
    return changes


def is_same(a: Any, b: Any) -> bool:
    """Whether two traits are equal, also as text: NaN differs from itself."""
    return a == b or _as_json(a) == _as_json(b)


def _as_json(trait: Any) -> str:
    return json.dumps(trait, sort_keys=True, default=str)


def check_position(position: Any) -> None:
    """Raises a ValueError unless it is a `DataPosition`."""
    if not isinstance(position, DataPosition):
        raise ValueError(
            f"`position` is a {type(position).__name__}, not a `DataPosition`: "
            "pass what `Checkpoints.restore` or `MeshLoader.position` returned."
        )
