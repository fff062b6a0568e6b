"""Measures the examples of a stream, and applies the policy for overlong examples."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import MAX_LENGTH
from jaxbucket.base.policies import TRUNCATING
from jaxbucket.data.example import Example, Sequences, copy_features
from jaxbucket.data.example_spec import ExampleSpec
from jaxbucket.plan.flow.dominance import is_maximal

if TYPE_CHECKING:
    from jaxbucket.stream.reader import StreamCounts

# The lengths of the sequences of an example, sorted by the names of the sequences; a
# single one if examples have one length.
ExampleLengths = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LengthLimits:
    """The lengths that buckets hold, and the policies for overlong examples.

    Attributes:
      names: the names of several sequences, sorted; empty if examples have one length.
      sequences: the features whose length counts; with several sequences, a mapping
        from each to its features.
      shapes: the T of each sequence in the longest buckets. An example that fits into
        any bucket fits into one of these.
      policies: `[Q]`, the policy for each sequence that is too long.
    """

    names: tuple[str, ...]
    sequences: Sequences
    shapes: tuple[ExampleLengths, ...]
    policies: tuple[str, ...]

    @classmethod
    def of_plan(cls, plan: BucketPlan, sequences: Sequences) -> LengthLimits:
        """Returns the limits of the buckets of a plan."""
        shapes = plan.seq_lens[is_maximal(plan.seq_lens)].tolist()
        policies = tuple(map(plan.policy, plan.sequences or (None,)))
        return cls(plan.sequences, sequences, tuple(map(tuple, shapes)), policies)

    @classmethod
    def unlimited(cls, names: Collection[str], sequences: Sequences) -> LengthLimits:
        """Returns limits that hold every length of 32 bits."""
        number = max(1, len(names))
        shapes = ((MAX_LENGTH,) * number,)
        return cls(tuple(sorted(names)), sequences, shapes, ("error",) * number)

    def apply(
        self, example: Example, counts: StreamCounts
    ) -> list[tuple[ExampleLengths, Example]]:
        """Returns an example with its lengths, or its chunks; empty if it is dropped.

        Args:
          example: a dict of arrays, which are copied.
          counts: the counts of the stream, which are updated.
        """
        spec = ExampleSpec(example, self.sequences, self.names)
        by_name = spec.lengths()
        names = self.names or tuple(by_name)
        lengths = tuple(by_name[name] for name in names)
        if self._hold(lengths):
            return [(lengths, copy_features(example))]
        if self.policies == ("split",):
            counts.split += 1
            (length,), ((size,),) = lengths, self.shapes
            starts = range(0, length, size)
            return [
                _chunk(spec, {names[0]: slice(x, min(x + size, length))})
                for x in starts
            ]
        kept = self._truncated(lengths)
        if not self._hold(kept):
            if "drop" not in self.policies:
                raise ValueError(self._overlong_message(lengths))
            counts.dropped += 1
            return []
        counts.truncated += 1
        counts.truncated_tokens += sum(lengths) - sum(kept)
        starts = (
            length - size if policy == "truncate_left" else 0
            for length, size, policy in zip(lengths, kept, self.policies, strict=True)
        )
        spans = (slice(x, x + size) for x, size in zip(starts, kept, strict=True))
        return [_chunk(spec, dict(zip(names, spans, strict=True)))]

    def _hold(self, lengths: ExampleLengths) -> bool:
        return any(all(map(operator.le, lengths, shape)) for shape in self.shapes)

    def _truncated(self, lengths: ExampleLengths) -> ExampleLengths:
        """Returns the lengths after truncation; the same if the example is dropped."""
        kept = list(lengths)
        limits = list(map(max, zip(*self.shapes, strict=True)))
        is_over = list(map(operator.gt, lengths, limits))
        if "drop" in itertools.compress(self.policies, is_over):
            return lengths
        for q, longest in enumerate(limits):
            if not is_over[q]:
                continue
            if self.policies[q] == "error":
                raise ValueError(self._overlong_message(lengths))
            if self.policies[q] in TRUNCATING:
                kept[q] = longest
        return tuple(kept)

    def _overlong_message(self, lengths: ExampleLengths) -> str:
        found, longest = lengths, self.shapes
        if self.names:
            found, *longest = (
                dict(zip(self.names, x, strict=True)) for x in (lengths, *longest)
            )
        return (
            f"No bucket holds the length {found}; the longest are {longest}. Plan with "
            "a larger `max_seq_len`, or with another policy `overlong`, such as 'drop' "
            "or 'truncate'."
        )


def _chunk(
    spec: ExampleSpec, spans: Mapping[str, slice]
) -> tuple[ExampleLengths, Example]:
    """Returns the lengths of a part of an example, and the part.

    Args:
      spec: the example.
      spans: the positions to keep in each sequence, in the order of the lengths.
    """
    # Copied, because a view would keep the whole array in memory.
    chunk = {
        name: np.array(value[tuple(spans[x] for x in spec.axes.get(name, ()))])
        for name, value in spec.arrays.items()
    }
    return tuple(span.stop - span.start for span in spans.values()), chunk
