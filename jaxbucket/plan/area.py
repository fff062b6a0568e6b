"""The cost and the budget of batches of images, which have two lengths.

The work of a batch `[B, H, W, ...]` is proportional to B * H * W, not to the sum of its
T, B * (H + W).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxbucket.base.checks import check_positive
from jaxbucket.plan.two_lengths import two_lengths


@dataclasses.dataclass(frozen=True)
class AreaCost:
    """Costs proportional to B * H * W: every pixel costs the same, padding included.

    Example:
      >>> AreaCost("height", "width")(8, {"height": 32, "width": 64})
      16384

    Attributes:
      height: the name of a sequence, of which H is the T.
      width: the name of the sequence of W.
    """

    height: str
    width: str

    unit = "pixels"

    def __call__(self, batch_size: int, seq_lens: Mapping[str, int]) -> int:
        return batch_size * _area(self, seq_lens)


@dataclasses.dataclass(frozen=True)
class AreaBudget:
    """The largest B * H * W of a batch, for `max_tokens` of `plan_buckets`.

    Example:
      >>> import jaxbucket as jb
      >>> lengths = {"height": [32, 64, 64], "width": [64, 32, 64]}
      >>> budget = AreaBudget(8192, "height", "width")
      >>> plan = jb.plan_buckets(lengths, max_tokens=budget, num_buckets=2)
      >>> all(b.batch_size * b.seq_len["height"] * b.seq_len["width"] <= 8192
      ...     for b in plan.buckets)
      True

    Attributes:
      max_area: the largest B * H * W, padding counted.
      height: the name of a sequence, of which H is the T.
      width: the name of the sequence of W.

    Raises:
      ValueError: if `max_area` is not a positive integer.
    """

    max_area: int
    height: str
    width: str

    def __post_init__(self):
        object.__setattr__(self, "max_area", check_positive("max_area", self.max_area))

    def __call__(self, seq_lens: Mapping[str, int]) -> int:
        """Returns the largest B * (sum of all T); 1 if no row fits."""
        batch_size = self.max_area // _area(self, seq_lens)
        return max(1, batch_size * sum(seq_lens.values()))


def _area(sequences: AreaCost | AreaBudget, seq_lens: Mapping[str, int]) -> int:
    """Returns H * W."""
    names = (sequences.height, sequences.width)
    height, width = two_lengths(sequences, names, seq_lens)
    return height * width
