"""Measures the examples of a stream, and applies the policy for overlong examples."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np

from jaxbucket.base.buckets import BucketPlan
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
    """The lengths that a stream keeps.

    Attributes:
      names: the names of several sequences, sorted; empty if examples have one length.
      sequences: the features whose length counts; with several sequences, a mapping
        from each to its features.
      plan: the buckets, and the policy for overlong examples; None to keep all lengths.
    """

    names: tuple[str, ...]
    sequences: Sequences
    plan: BucketPlan | None = None

    @functools.cached_property
    def _shapes(self) -> list[ExampleLengths]:
        """The longest buckets. An example that fits into any fits into one of these."""
        seq_lens = cast(BucketPlan, self.plan).seq_lens
        return seq_lens[is_maximal(seq_lens)].tolist()

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
        if self.plan is None or self._hold(lengths):
            return [(lengths, copy_features(example))]
        if self.plan.overlong == "split":
            counts.split += 1
            (length,), size = lengths, self.plan.max_seq_len
            starts = range(0, length, size)
            return [
                _chunk(spec, {names[0]: slice(x, min(x + size, length))})
                for x in starts
            ]
        row = np.array([lengths] if self.names else lengths)
        if self.plan.assign(row)[0] < 0:
            counts.dropped += 1
            return []
        kept = self.plan.truncated(row).ravel().tolist()
        counts.truncated += 1
        counts.truncated_tokens += sum(lengths) - sum(kept)
        starts = (
            length - size if policy == "truncate_left" else 0
            for length, size, policy in zip(
                lengths, kept, self.plan.policies, strict=True
            )
        )
        spans = (slice(x, x + size) for x, size in zip(starts, kept, strict=True))
        return [_chunk(spec, dict(zip(names, spans, strict=True)))]

    def _hold(self, lengths: ExampleLengths) -> bool:
        return any(all(map(operator.le, lengths, shape)) for shape in self._shapes)


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
