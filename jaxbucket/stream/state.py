"""The state of a stream that checkpoints hold, and checks of a restored state."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxbucket.base.position import is_same, later_change
from jaxbucket.stream.lockstep import Round
from jaxbucket.stream.reader import Snapshot, StreamCounts, StreamReader

_REMEDY = (
    "Make it the same whenever it is read, by seeding all random draws. If a loader "
    "shuffles, pass a function of (epoch, seed) that creates it with this seed; if its "
    "state does not include a buffer of shuffled examples, omit `resume`."
)


@dataclasses.dataclass(frozen=True)
class StreamState:
    """The state of a stream before a step.

    Attributes:
      config: what the batches before the step depend on.
      step: the next step.
      read: the number of examples read.
      arrived: the number of examples that have arrived.
      checksum: the checksum of these examples.
      ended: whether the stream had ended.
      pending: indices of the pending examples, ascending.
      current_round: None if the step is the first of a round.
      snapshot: the point from which the pending examples can be read again.
    """

    config: Mapping[str, Any]
    step: int
    read: int
    arrived: int
    checksum: int
    ended: bool
    pending: list[int]
    current_round: Round | None
    snapshot: Snapshot

    def to_dict(self) -> dict[str, Any]:
        """Returns plain Python values, except for the state of the user's iterator."""
        snapshot = self.snapshot
        return {
            **{name: getattr(self, name) for name in _COPIED},
            # Strings, so that the states of all steps have the same structure.
            "pending": " ".join(str(self.arrived - index) for index in self.pending),
            "round": json.dumps(self.current_round),
            **snapshot._asdict(),
            "counts": dataclasses.asdict(snapshot.counts),
            "snapshot_checksum": snapshot.checksum,
            "checksum": self.checksum,
        }

    @classmethod
    def from_dict(cls, state: Any) -> StreamState:
        """Parses the result of `to_dict`.

        Raises:
          ValueError: if `state` is something else.
        """
        names = {*_COPIED, "pending", "round", *Snapshot._fields, "snapshot_checksum"}
        if not isinstance(state, Mapping) or state.keys() != names:
            raise ValueError(
                "`state` is not the state of a stream of batches. Pass the result of "
                "`get_state()` or `state_before(step)` of its iterator."
            )
        saved = json.loads(state["round"])
        snapshot = {name: state[name] for name in Snapshot._fields}
        snapshot["counts"] = StreamCounts(**state["counts"])
        snapshot["checksum"] = state["snapshot_checksum"]
        return cls(
            **{name: state[name] for name in _COPIED},
            pending=[state["arrived"] - int(x) for x in state["pending"].split()],
            current_round=None if saved is None else Round(*saved),
            snapshot=Snapshot(**snapshot),
        )

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Raises a ValueError that lists all differences from the present config."""
        changes = {
            name: f"{name.replace('_', ' ')} {self.config.get(name, 'absent')} -> "
            f"{config.get(name, 'absent')}"
            for name in {**self.config, **config}
            if not is_same(self.config.get(name), config.get(name))
        }
        if not changes:
            return
        remedy = "Use the previous options."
        if changes.keys() & {"parts", "shard", "processes_meet"}:
            remedy = (
                "Streams resume only with the same number of processes and devices, "
                "and each process from a state that it saved itself."
            )
        elif "plans" in changes:
            remedy += f" {later_change('plan')}"
        raise ValueError(
            f"Cannot resume at step {self.step}, because the stream is batched "
            f"differently: {'; '.join(changes.values())}. {remedy}"
        )

    def check_read(self, reader: StreamReader, pending: Sequence[Any]) -> None:
        """Raises a ValueError if the stream no longer has the same examples."""
        counts = reader.counts
        saved = (self.read, self.arrived, len(self.pending))
        if saved != (counts.read, counts.arrived, len(pending)):
            raise ValueError(
                f"The stream has changed: {self.read} examples had been read, of which "
                f"{len(self.pending)} were pending. Now {counts.read} are read, of "
                f"which {len(pending)} are pending. {_REMEDY}"
            )
        if reader.checksum != self.checksum:
            raise ValueError(
                f"The stream has changed: its first {self.read} examples have other "
                f"contents. {_REMEDY}"
            )


# The entries of a state that are attributes as they are.
_COPIED = ("config", "step", "read", "arrived", "checksum", "ended")
