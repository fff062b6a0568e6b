"""The state of a stream that checkpoints hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxbucket.base.position import DataPosition
from jaxbucket.stream.lockstep import Round
from jaxbucket.stream.reader import Snapshot, StreamCounts


@dataclasses.dataclass(frozen=True)
class StreamState:
    """The state of a stream before a step.

    Attributes:
      position: the step, and what the batches before it depend on.
      counts: the counts of the examples that have been read.
      pending: indices of the pending examples, ascending.
      current_round: None if the step is the first of a round.
      snapshot: the point from which the pending examples can be read again.
    """

    position: DataPosition
    counts: StreamCounts
    pending: list[int]
    current_round: Round | None
    snapshot: Snapshot

    def to_dict(self) -> dict[str, Any]:
        """Returns plain Python values, except for the state of the user's iterator.

        The states of all steps have the same structure, so those parts whose structure
        may differ are strings.
        """
        offsets = (self.counts.arrived - index for index in self.pending)
        counts = dataclasses.asdict(self.snapshot.counts)
        return {
            "position": json.dumps(self.position.to_dict()),
            "counts": dataclasses.asdict(self.counts),
            "pending": " ".join(map(str, offsets)),
            "round": json.dumps(self.current_round),
            "snapshot": {**self.snapshot._asdict(), "counts": counts},
        }

    @classmethod
    def from_dict(cls, state: Any) -> StreamState:
        """Parses the result of `to_dict`.

        Raises:
          ValueError: if `state` is something else.
        """
        names = {field.name for field in dataclasses.fields(cls)} - {"current_round"}
        if not isinstance(state, Mapping) or state.keys() != {*names, "round"}:
            raise ValueError(
                "`state` is not the state of a stream of batches. Pass the result of "
                "`get_state()` or `state_before(step)` of its iterator."
            )
        counts = StreamCounts(**state["counts"])
        saved, snapshot = json.loads(state["round"]), state["snapshot"]
        return cls(
            DataPosition.from_dict(json.loads(state["position"])),
            counts,
            [counts.arrived - int(x) for x in state["pending"].split()],
            None if saved is None else Round(*saved),
            Snapshot(**{**snapshot, "counts": StreamCounts(**snapshot["counts"])}),
        )
