"""Where a process stands in its stream, and whether others can go on with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbucket.data.example import Features


class PeerStatus(NamedTuple):
    """What a process tells the others at the start of a round."""

    config: dict[str, Any]  # Equal in all processes.
    parts: list[int]  # Of all rows.
    pool_digest: str  # Equal in processes with the same parts.
    ended: bool  # Whether its stream has ended.
    shortest: int  # Bucket of the shortest pending example; K if there is none.
    rows_needed: list[int]  # `[K]`, that hold its pending examples.
    features: Features  # Empty if it has had no example.

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> PeerStatus:
        return cls(**json.loads(text))


def check_same_config(statuses: Sequence[PeerStatus]) -> None:
    """Raises a ValueError that says in what processes do not batch alike."""
    differences = list(_differences(statuses))
    if differences:
        raise ValueError(
            f"The processes do not batch their streams alike: {'; '.join(differences)}."
            " Start all of them with the same plan, lengths and options, from the same "
            "step."
        )


def _differences(statuses: Sequence[PeerStatus]) -> Iterator[str]:
    """Compares each process with the first one of its kind."""
    for index, status in enumerate(statuses):
        for name, value in statuses[0].config.items():
            # As text, because NaN is not equal to itself.
            if str(other := status.config.get(name)) != str(value):
                yield (
                    f"{name.replace('_', ' ')} is {value} in process 0, "
                    f"{other} in {index}"
                )
    kinds = [(index, _kinds(x)) for index, x in enumerate(statuses) if x.features]
    for index, kind in kinds:
        first, expected = kinds[0]
        if kind != expected:
            yield f"features are {expected} in process {first}, {kind} in {index}"
    first_with: dict[tuple[int, ...], int] = {}
    for index, status in enumerate(statuses):
        first = first_with.setdefault(tuple(status.parts), index)
        if status.pool_digest != statuses[first].pool_digest:
            yield (
                f"processes {first} and {index} have the same rows, {status.parts}, "
                "but not the same stream"
            )


def _kinds(status: PeerStatus) -> dict[str, str]:
    """Returns the dtype of each feature, and its shape behind the sequence axis."""
    kinds, sequences = {}, status.config["sequences"]
    for name, (dtype, shape) in sorted(status.features.items()):
        is_sequence = sequences is None or name in sequences
        # The dtype of a text depends on its length.
        dtype = "text" if np.dtype(dtype).kind in "SU" else dtype
        kinds[name] = f"{dtype}{list(shape[is_sequence:])}"
    return kinds
