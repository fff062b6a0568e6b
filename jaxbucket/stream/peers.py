"""The status that processes exchange, and the check that their options agree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxbucket.data.example import Features

# Fewer different examples may be the same by chance, or may be repeated on purpose.
_MIN_DISTINCT = 4


class PeerStatus(NamedTuple):
    """The status that a process sends to the others at the start of a round."""

    config: dict[str, Any]  # Equal in all processes.
    parts: list[int]  # The parts of the rows that this process has.
    pool_digest: str  # Equal in processes with the same parts.
    ended: bool  # Whether the stream of this process has ended.
    shortest: int  # First bucket with a pending example; K if there is none.
    rows_needed: list[int]  # `[K]` rows that hold the pending examples.
    features: Features  # Empty if no example has arrived.
    arrived: int  # The number of examples that have arrived.
    checksum: int  # Of these examples.
    distinct: int = 0  # Different examples among the pending ones; 0 if not counted.

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> PeerStatus:
        return cls(**json.loads(text))


def check_same_config(statuses: Sequence[PeerStatus]) -> None:
    """Raises a ValueError that lists all differences between the processes."""
    differences = list(_differences(statuses))
    if differences:
        raise ValueError(
            "The processes have different stream configurations: "
            f"{'; '.join(differences)}. Start all of them with the same plan, lengths, "
            "options and step."
        )


def check_different_examples(statuses: Sequence[PeerStatus]) -> None:
    """Raises a ValueError if processes with different rows have read the same examples.

    Data to measure the throughput may consist of a few examples that are repeated.
    """
    first_with: dict[tuple[int, int], int] = {}
    for index, status in enumerate(statuses):
        first = first_with.setdefault((status.arrived, status.checksum), index)
        is_varied = status.distinct >= _MIN_DISTINCT
        if is_varied and status.parts != statuses[first].parts:
            raise ValueError(
                f"Processes {first} and {index} fill different rows, but their streams "
                f"begin with the same {status.arrived} examples, so examples would be "
                "repeated. Read a different part in each process, for example with "
                "`from_loader(..., shard=jb.sharding.local_rows(mesh))`."
            )


def _differences(statuses: Sequence[PeerStatus]) -> Iterator[str]:
    """Compares each process with the first one that has comparable values."""
    for index, status in enumerate(statuses):
        for name, value in statuses[0].config.items():
            # Compared as text, because NaN is not equal to itself.
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
                "but different streams"
            )


def _kinds(status: PeerStatus) -> dict[str, str]:
    """Returns the dtype of each feature, and its shape without sequence axes."""
    kinds, sequences = {}, status.config["sequences"]
    if isinstance(sequences, dict):
        # A feature of several sequences has `[name, axis]` for each axis but the first.
        entries = [entry for names in sequences.values() for entry in names]
        sequences = [x if isinstance(x, str) else x[0] for x in entries]
    for name, (dtype, shape) in sorted(status.features.items()):
        num_axes = 1 if sequences is None else sequences.count(name)
        # The dtype of a string depends on its length.
        dtype = "text" if np.dtype(dtype).kind in "SU" else dtype
        kinds[name] = f"{dtype}{list(shape[num_axes:])}"
    return kinds
