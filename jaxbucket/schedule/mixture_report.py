"""What each component of a mixture contributes to a number of steps."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxbucket.base.table import Record
from jaxbucket.plan.formatting import number_table


@dataclasses.dataclass(frozen=True)
class ComponentReport:
    """One component of a mixture over a number of steps.

    Attributes:
      name: its name, or its index.
      steps: the number of its steps, exactly; with `accumulate`, of its batches.
      epochs: the number of its epochs, of which the last may be incomplete.
      examples: the number of examples in these steps. If an epoch is incomplete, its
        examples are counted in proportion to its steps, as are its tokens.
      real_tokens: the number of tokens in these steps, without padding.
      padding: the share of padding in an epoch of the component.
    """

    name: str
    steps: int
    epochs: float
    examples: float
    real_tokens: float
    padding: float


@dataclasses.dataclass(frozen=True)
class MixtureReport(Record):
    """The components of a mixture over a number of steps.

    Attributes:
      num_steps: the number of steps of the mixture.
      components: the components.
    """

    num_steps: int
    components: tuple[ComponentReport, ...]

    @property
    def token_shares(self) -> list[float]:
        """The share of each component in the real tokens."""
        total = sum(component.real_tokens for component in self.components)
        return [component.real_tokens / total for component in self.components]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"token_shares": self.token_shares}

    def __rich__(self) -> Any:
        columns = ("", "steps", "epochs", "examples", "tokens", "share", "padding")
        rows = (
            (
                *(x.name, f"{x.steps:,}", f"{x.epochs:.2f}", f"{x.examples:,.0f}"),
                *(f"{x.real_tokens:,.0f}", f"{share:.1%}", f"{x.padding:.1%}"),
            )
            for x, share in zip(self.components, self.token_shares, strict=True)
        )
        caption = f"{self.num_steps:,} steps. Share: share of all tokens, not padding."
        return number_table(columns, rows, caption)
