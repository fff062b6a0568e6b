"""What a checkpoint keeps of a stream, and the refusal of what is none."""

from __future__ import annotations

import dataclasses
import itertools
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxbucket.base.position import is_same
from jaxbucket.data.example import Features
from jaxbucket.stream.reader import Snapshot, StreamCounts
from jaxbucket.stream.rounds import Round

_FORMAT = "jaxbucket.stream"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class StreamState:
    """Where in a stream a run is.

    Attributes:
      traits: what batches depend on, as plain Python.
      step: the next one.
      read: examples that have been read.
      places: of what waits in the pool, ascending.
      next_place: of what arrives next.
      tokens: positions of what waits, by which a stream that changed is known, and
      checksum: of their lengths and of what some of them hold.
      snapshot: from where they are read again.
      inside: the round of several processes that this step is in; None where it is
        the first of one.
      features: name -> (dtype, shape) of the example that batches have features of;
        empty where there was none yet.
    """

    traits: dict[str, Any]
    step: int
    read: int
    places: list[int]
    next_place: int
    tokens: int
    checksum: int
    snapshot: Snapshot
    inside: Round | None
    features: Features

    def to_dict(self) -> dict[str, Any]:
        """Returns plain Python, beside the state of the user's iterator."""
        snapshot = self.snapshot
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "traits": self.traits,
            "step": self.step,
            "read": self.read,
            "next_place": self.next_place,
            "waiting": _as_text(self.places),
            "tokens": self.tokens,
            "checksum": self.checksum,
            # One word, too, and so are features.
            "round": json.dumps(self.inside),
            "features": json.dumps(self.features),
            "epoch": snapshot.epoch,
            "number": snapshot.number,
            "counts": dataclasses.asdict(snapshot.counts),
            "parent": snapshot.state,
        }

    @classmethod
    def from_dict(cls, state: Any) -> StreamState:
        """Reads what `to_dict` returned.

        Raises:
          ValueError: if it is something else.
        """
        if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
            raise ValueError(
                "`state` is none of a stream of batches. Pass what `get_state()` or "
                "`state_before(step)` of its iterator gave."
            )
        if state.get("version") != _VERSION:
            raise ValueError(
                f"`state` has version {state.get('version')!r}, and this jaxbucket "
                f"reads version {_VERSION}. Go on with the version that wrote it."
            )
        try:
            places = _from_text(state["waiting"])
            names = [field.name for field in dataclasses.fields(StreamCounts)]
            counts = StreamCounts(**{x: _natural(state["counts"][x]) for x in names})
            snapshot = Snapshot(
                _natural(state["epoch"]),
                _natural(state["number"]),
                counts,
                state["parent"],
            )
            names = ("step", "read", "next_place", "tokens", "checksum")
            numbers = [_natural(state[name]) for name in names]
            step, read, next_place, tokens, checksum = numbers
            traits = dict(state["traits"])
            inside = _round_of(json.loads(state["round"]), step)
            features: Features = {
                str(name): (str(np.dtype(dtype)), [int(n) for n in shape])
                for name, (dtype, shape) in json.loads(state["features"]).items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"`state` is cut or changed ({type(error).__name__}: {error}). Restore "
                "an earlier checkpoint."
            ) from None
        return cls(
            *(traits, step, read, places, next_place, tokens, checksum, snapshot),
            *(inside, features),
        )

    def check_same(self, traits: Mapping[str, Any]) -> None:
        """Raises a ValueError that names every trait that is not what it was."""
        changes = [
            f"{name.replace('_', ' ')} {_shown(self.traits, name)} -> "
            f"{_shown(traits, name)}"
            for name in {**self.traits, **traits}
            if not is_same(self.traits.get(name), traits.get(name))
        ]
        if changes:
            raise ValueError(
                f"Cannot go on at step {self.step}, for the stream is batched in "
                f"another way: {'; '.join(changes)}. Give back what it was. A new "
                "plan takes over at a later step: `plan={0: old, step: new}`."
            )

    def check_read(
        self, counts: StreamCounts, number: int, tokens: int, checksum: int
    ) -> None:
        """Raises a ValueError if not the same was read again."""
        found = (counts.read, counts.arrived, number, tokens)
        if found != (self.read, self.next_place, len(self.places), self.tokens):
            raise ValueError(
                f"The stream is not what it was: {self.read} examples had been read, "
                f"of which {len(self.places)} with {self.tokens} tokens waited, and "
                f"now it gives {counts.read}, {number} and {tokens}. A stream has to "
                "be the same whenever it is read: seed what is drawn in it."
            )
        if checksum != self.checksum:
            raise ValueError(
                f"The stream is not what it was: the {len(self.places)} examples that "
                f"waited have {tokens} tokens as they had, but not the same ones. A "
                "stream has to be the same whenever it is read: seed what is drawn in "
                "it."
            )


def checksum_of(lengths: Iterable[int], checksums: Iterable[int]) -> int:
    """Returns one number for all, in their order."""
    array = np.array([*lengths, *checksums], "<u4")
    return zlib.crc32(array.data)


def _shown(traits: Mapping[str, Any], name: str) -> Any:
    return traits.get(name, "absent")


def _natural(number: Any) -> int:
    if isinstance(number, bool) or int(number) != number or number < 0:
        raise ValueError(f"{number!r} is no count")
    return int(number)


def _round_of(found: Any, step: int) -> Round | None:
    if found is None:
        return None
    first, end, above, rest = found
    if not first < step < end or rest == []:
        raise ValueError(f"step {step} is not inside of a round from {first} to {end}")
    if rest is not None:
        rest = [(_natural(bucket), _natural(batches)) for bucket, batches in rest]
    return Round(_natural(first), _natural(end), _natural(above + 1) - 1, rest)


def _as_text(places: list[int]) -> str:
    """The places as one word: whoever saves states wants all of them of one shape.

    Example:
      >>> _as_text([7, 8, 12]), _from_text("7 1 4")
      ('7 1 4', [7, 8, 12])
    """
    pairs = itertools.pairwise([0, *places])
    return " ".join(str(place - before) for before, place in pairs)


def _from_text(text: str) -> list[int]:
    return list(itertools.accumulate(_natural(int(x)) for x in text.split()))
