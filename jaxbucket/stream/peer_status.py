"""Where a process stands in its stream, and whether others can go on with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbucket.data.example import Features


class Standing(NamedTuple):
    """What a process tells the others.

    Attributes:
      batching: what must be the same in all, as plain Python.
      parts: of all rows, those that it has.
      waiting: a digest of what waits, the same wherever the parts are.
      ended: whether its stream is over.
      shortest: the bucket of the shortest that waits; behind the last for none.
      left: `[K]` rows that what waits needs at the end.
      features: of examples, where it has had one.
    """

    batching: dict[str, Any]
    parts: list[int]
    waiting: str
    ended: bool
    shortest: int
    left: list[int]
    features: Features

    def to_text(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_text(cls, text: str) -> Standing:
        return cls(**json.loads(text))


def check_alike(told: Sequence[Standing]) -> None:
    """Raises a ValueError if processes do not batch alike; it says in what."""
    differences = list(_differences(told))
    if differences:
        raise ValueError(
            f"The processes do not batch their streams alike: {'; '.join(differences)}."
            " Start all of them with the same plan, lengths and options, from the same "
            "step."
        )


def _differences(told: Sequence[Standing]) -> Iterator[str]:
    """What each has to itself, beside the first process that has it otherwise."""
    first = told[0]
    for index, other in enumerate(told):
        for name, value in first.batching.items():
            # As text: what fills rows behind their end may be no number.
            if str(theirs := other.batching.get(name)) != str(value):
                yield (
                    f"{name.replace('_', ' ')} is {value} in process 0, "
                    f"{theirs} in {index}"
                )
    having = [(index, x) for index, x in enumerate(told) if x.features]
    for index, other in having:
        (one, features), theirs = having[0], _kinds(other)
        if theirs != (kinds := _kinds(features)):
            yield f"features are {kinds} in process {one}, {theirs} in {index}"
    of_parts: dict[tuple[int, ...], int] = {}
    for index, other in enumerate(told):
        one = of_parts.setdefault(tuple(other.parts), index)
        if other.waiting != told[one].waiting:
            yield (
                f"processes {one} and {index} have the same rows, {other.parts}, but "
                "not the same stream"
            )


def _kinds(standing: Standing) -> dict[str, str]:
    """The dtype of each feature, and its shape behind the positions."""
    kinds, sequences = {}, standing.batching["sequences"]
    for name, (dtype, shape) in sorted(standing.features.items()):
        is_sequence = sequences is None or name in sequences
        # Texts of one feature have a dtype each, by how long they are.
        dtype = "text" if np.dtype(dtype).kind in "SU" else dtype
        kinds[name] = f"{dtype}{list(shape[is_sequence:])}"
    return kinds
