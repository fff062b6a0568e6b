"""`Bucket`, one batch shape `[B, T]`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxbucket.base.checks import MAX_TOKENS, check_positive
from jaxbucket.base.sizes import Size, Sizes, checked_size, each_size, total


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """One static batch shape `[B, T]`, in array order.

    Examples with several sequences, such as source and target, have a T for each.

    Example:
      >>> Bucket(8, 128).num_tokens, Bucket(8, {"source": 64, "target": 32}).num_tokens
      (1024, 768)

    Attributes:
      batch_size: B, the number of rows of the global batch, over all devices.
      seq_len: T, the number of positions in each row; a mapping from sequence name to
        T, stored as `Sizes`, if examples have several sequences.

    Raises:
      ValueError: if a size is not a positive integer, or B * T is not below 2**40.
    """

    batch_size: int
    seq_len: Size

    if TYPE_CHECKING:
        # Any mapping is accepted, and stored as `Sizes`.
        def __init__(
            self, batch_size: int, seq_len: int | Mapping[str, int]
        ) -> None: ...

    def __post_init__(self):
        batch_size = check_positive("batch_size", self.batch_size)
        object.__setattr__(self, "batch_size", batch_size)
        object.__setattr__(self, "seq_len", checked_size("seq_len", self.seq_len))
        if self.num_tokens >= MAX_TOKENS:
            raise ValueError(
                f"`batch_size={batch_size}` rows of `seq_len={self.seq_len!r}` have "
                f"{self.num_tokens} tokens. Lower one of the two, to less than 2**40."
            )

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """The T of each sequence, in alphabetical order; with one length, only T."""
        return each_size(self.seq_len)

    @property
    def sequences(self) -> tuple[str, ...]:
        """The names of several sequences, in alphabetical order."""
        return tuple(self.seq_len) if isinstance(self.seq_len, Sizes) else ()

    @property
    def tokens_per_row(self) -> int:
        """T, or the sum of the T of several sequences."""
        return total(self.seq_len)

    @property
    def num_tokens(self) -> int:
        """B * T, including padding."""
        return self.batch_size * self.tokens_per_row

    def of(self, component: str) -> ComponentBucket:
        """Returns the bucket of one component of a mixture."""
        return ComponentBucket(self.batch_size, self.seq_len, component)

    def to_list(self) -> list[Any]:
        """Returns `[B, T]` for JSON, where T may be a dict."""
        seq_len = self.seq_len
        return [
            self.batch_size,
            dict(seq_len) if isinstance(seq_len, Sizes) else seq_len,
        ]

    def __str__(self) -> str:
        return f"[{self.batch_size}, {self.seq_len}]"


@dataclasses.dataclass(frozen=True, order=True)
class ComponentBucket(Bucket):
    """A bucket of one component of a mixture.

    It is not equal to the same bucket of a component with different features.

    Example:
      >>> print(ComponentBucket(8, 512, "audio"))
      [8, 512] of 'audio'

    Attributes:
      component: the name of the component.
    """

    component: str

    def __str__(self) -> str:
        return f"{super().__str__()} of {self.component!r}"
