"""The cost of a step of a transformer with an encoder and a decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxbucket.plan.costs import FlopCost
from jaxbucket.plan.two_lengths import two_lengths


@dataclasses.dataclass(frozen=True)
class EncoderDecoderCost(FlopCost):
    """Floating-point operations of a train step of an encoder and a decoder.

    Per row, an encoder of L layers of width d costs 72 S L d^2 + 12 L d S^2 for S
    positions, as in `TransformerCost`. A decoder has as many operations for its T
    positions, and cross attention adds 12 L d^2 (S + T) for the projections and
    12 L d S T for the pairs of positions. Outputs cost 6 T V d for V outputs. All of
    this counts a backward pass of twice the cost of the forward pass.

    Example:
      >>> cost = EncoderDecoderCost("source", "target", 512, 6, vocab_size=32_000)
      >>> short, long = {"source": 64, "target": 8}, {"source": 8, "target": 64}
      >>> cost(1, short) < cost(1, long)
      True

    Attributes:
      source: the name of the sequence that the encoder reads.
      target: the name of the sequence of the decoder.
      width: d, the width of both residual streams.
      depth: L, the number of layers of the encoder, and of the decoder.
      vocab_size: V, the number of outputs per target position; 0 leaves them out.
      flops_per_second: the number of operations that the machine performs in a second.
        If given, the cost is in seconds, otherwise in operations.

    Raises:
      ValueError: if a size is not a positive integer, or `flops_per_second` is not a
        positive, finite number.
    """

    source: str
    target: str
    width: int
    depth: int
    vocab_size: int = 0
    flops_per_second: float | None = None

    def __call__(self, batch_size: int, seq_lens: Mapping[str, int]) -> float:
        if not isinstance(seq_lens, Mapping):
            raise ValueError(
                "`EncoderDecoderCost` requires examples with several sequences. Use "
                "`TransformerCost` or your own function"
            )
        s, t = two_lengths(self, (self.source, self.target), seq_lens)
        dense = 72 * (s + t) + 12 * (s + t)
        attention = 12 * (s * s + t * t + s * t)
        layers = self.depth * self.width * (self.width * dense + attention)
        outputs = 6 * t * self.vocab_size * self.width
        return self._in_unit(batch_size * (layers + outputs))
