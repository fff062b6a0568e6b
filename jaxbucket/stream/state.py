"""The state of a stream that checkpoints hold, and checks of a restored state."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxbucket.base.position import is_same, later_change
from jaxbucket.data.example import Features, example_from_specs
from jaxbucket.stream.reader import PooledExample, Snapshot, StreamCounts
from jaxbucket.stream.rounds import Round

_FORMAT = "jaxbucket.stream"
_VERSION = 2
# What parsing an invalid state may raise; an infinite count overflows.
_PARSE_ERRORS = (AttributeError, KeyError, OverflowError, TypeError, ValueError)


@dataclasses.dataclass(frozen=True)
class StreamState:
    """The state of a stream before a step.

    Attributes:
      config: the options and plans that batches depend on.
      step: the next step.
      read: the number of examples read.
      next_index: index of the next example to arrive.
      pending: indices of the pending examples, ascending.
      tokens: tokens of the pending examples, to detect a stream that has changed.
      checksum: checksum of all examples that have arrived.
      snapshot: the point from which they can be read again.
      current_round: None if the step is the first of a round.
      features: the features of the batches; empty if not known yet.
    """

    config: dict[str, Any]
    step: int
    read: int
    next_index: int
    pending: list[int]
    tokens: int
    checksum: int
    snapshot: Snapshot
    current_round: Round | None
    features: Features

    @property
    def ended(self) -> bool:
        """Whether the stream had ended."""
        return not is_same(self.config["num_epochs"], 0)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain Python values, except for the state of the user's iterator."""
        snapshot = self.snapshot
        # The keys are part of the format of checkpoints and must not change.
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "traits": self.config,
            "step": self.step,
            "read": self.read,
            "next_place": self.next_index,
            # Strings, so that the states of all steps have the same structure.
            "waiting": _to_text(self.pending),
            "tokens": self.tokens,
            "checksum": self.checksum,
            "round": json.dumps(_round_to_list(self.current_round)),
            "features": json.dumps(self.features),
            "epoch": snapshot.epoch,
            "number": snapshot.epoch_index,
            "counts": dataclasses.asdict(snapshot.counts),
            "snapshot_checksum": snapshot.checksum,
            "parent": snapshot.state,
        }

    @classmethod
    def from_dict(cls, state: Any) -> StreamState:
        """Parses the result of `to_dict`.

        Raises:
          ValueError: if `state` is not valid.
        """
        if not isinstance(state, Mapping) or not is_same(state.get("format"), _FORMAT):
            raise ValueError(
                "`state` is not the state of a stream of batches. Pass the result of "
                "`get_state()` or `state_before(step)` of its iterator."
            )
        if not is_same(state.get("version"), _VERSION):
            raise ValueError(
                f"`state` has version {state.get('version')!r}, but this jaxbucket "
                f"reads version {_VERSION}. Resume with the jaxbucket that wrote it."
            )
        try:
            return cls._parse(state)
        except _PARSE_ERRORS as error:
            raise ValueError(
                f"`state` is truncated or modified ({type(error).__name__}: {error}). "
                "Restore an earlier checkpoint."
            ) from None

    @classmethod
    def _parse(cls, state: Mapping[str, Any]) -> StreamState:
        counts = state["counts"]
        names = [field.name for field in dataclasses.fields(StreamCounts)]
        features = {
            str(name): (str(np.dtype(dtype)), [int(n) for n in shape])
            for name, (dtype, shape) in json.loads(state["features"]).items()
        }
        example_from_specs(features)  # Raises an error if they are not valid.
        return cls(
            config={"num_epochs": 0, **state["traits"]},
            step=_count(state["step"]),
            read=_count(state["read"]),
            next_index=_count(state["next_place"]),
            pending=_from_text(state["waiting"]),
            tokens=_count(state["tokens"]),
            checksum=_count(state["checksum"]),
            snapshot=Snapshot(
                epoch=_count(state["epoch"]),
                epoch_index=_count(state["number"]),
                counts=StreamCounts(*(_count(counts[x]) for x in names)),
                checksum=_count(state["snapshot_checksum"]),
                state=state["parent"],
            ),
            current_round=_round_from_list(json.loads(state["round"]), state["step"]),
            features=features,
        )

    def check_config(self, config: Mapping[str, Any], step: int) -> None:
        """Raises a ValueError that lists all differences from the saved config.

        Args:
          config: the present config.
          step: the next step of the run, for the message.
        """
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
            f"Cannot resume at step {step}, because the stream is batched "
            f"differently: {'; '.join(changes.values())}. {remedy}"
        )

    def check_read(
        self, counts: StreamCounts, checksum: int, pending: Sequence[PooledExample]
    ) -> None:
        """Raises a ValueError if the stream no longer has the same examples."""
        remedy = (
            "Make it the same whenever it is read, by seeding all random draws. If a "
            "loader shuffles, pass a function of (epoch, seed) that creates it with "
            "this seed, and `resume='replay'` to `from_loader` if its state does not "
            "include the buffer of the shuffle."
        )
        number, tokens = len(pending), num_tokens(pending)
        if (counts.read, counts.arrived, number, tokens) != (
            *(self.read, self.next_index, len(self.pending), self.tokens),
        ):
            raise ValueError(
                f"The stream has changed: {self.read} examples had been read, and "
                f"{len(self.pending)} examples of {self.tokens} tokens were waiting "
                f"for a batch. Now {counts.read} are read, and {number} examples of "
                f"{tokens} tokens wait. {remedy}"
            )
        if checksum != self.checksum:
            raise ValueError(
                f"The stream has changed: its first {self.read} examples have other "
                f"contents. {remedy}"
            )


def num_tokens(pending: Sequence[PooledExample]) -> int:
    """Returns the number of tokens of examples."""
    return sum(example.num_tokens for example in pending)


def _count(number: Any) -> int:
    if isinstance(number, bool) or int(number) != number or number < 0:
        raise ValueError(f"{number!r} is not a count")
    return int(number)


# States hold `min_bucket - 1`, the longest bucket that is not used, or -1.


def _round_to_list(current: Round | None) -> list[Any] | None:
    if current is None:
        return None
    return [current.first, current.end, current.min_bucket - 1, current.drain]


def _round_from_list(numbers: Any, step: int) -> Round | None:
    if numbers is None:
        return None
    first, end, max_unused, drain = numbers
    if not first < step < end or drain == []:
        raise ValueError(f"step {step} is not inside a round from {first} to {end}")
    if drain is not None:
        drain = [(_count(bucket), _count(batches)) for bucket, batches in drain]
    return Round(_count(first), _count(end), _count(max_unused + 1), drain)


def _to_text(indices: list[int]) -> str:
    """Returns the first index and the gaps between indices, as text.

    Example:
      >>> _to_text([7, 8, 12]), _from_text("7 1 4")
      ('7 1 4', [7, 8, 12])
    """
    pairs = itertools.pairwise([0, *indices])
    return " ".join(str(index - before) for before, index in pairs)


def _from_text(text: str) -> list[int]:
    return list(itertools.accumulate(_count(int(x)) for x in text.split()))


def check_not_rejected(is_valid: bool) -> None:
    """Raises a ValueError if the state that was set last was rejected.

    Args:
      is_valid: False from a rejected state until a valid one is set.
    """
    if not is_valid:
        raise ValueError(
            "The last state that was set was rejected, so the iterator has no valid "
            "state. Call `set_state` with a saved state."
        )
