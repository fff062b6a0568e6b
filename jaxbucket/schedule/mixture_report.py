"""What each component of a mixture contributes to a number of steps."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from jaxbucket.base.table import table_text
from jaxbucket.plan.formatting import number_table
from jaxbucket.plan.reports.epoch import Report


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
      token_share: the component's share of the real tokens of the mixture.
    """

    name: str
    steps: int
    epochs: float
    examples: float
    real_tokens: float
    padding: float
    token_share: float = 0.0

    @classmethod
    def of(
        cls, name: str, epoch: Report, steps: int, steps_per_epoch: int
    ) -> ComponentReport:
        """Returns the numbers of a component over its first `steps` steps."""
        epochs = steps / steps_per_epoch
        examples = epoch.packed_examples or epoch.examples
        tokens = epochs * epoch.real_tokens
        return cls(name, steps, epochs, epochs * examples, tokens, epoch.padding)


@dataclasses.dataclass(frozen=True)
class MixtureReport:
    """The components of a mixture over a number of steps.

    Attributes:
      num_steps: the number of steps of the mixture.
      components: the components.
    """

    num_steps: int
    components: tuple[ComponentReport, ...]

    def __post_init__(self):
        total = sum(component.real_tokens for component in self.components)
        components = (
            dataclasses.replace(component, token_share=component.real_tokens / total)
            for component in self.components
        )
        object.__setattr__(self, "components", tuple(components))

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python values."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Returns all numbers as one JSON object."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        return table_text(self)

    def __rich__(self) -> Any:
        """Returns the report as a `rich` table, for a terminal."""
        columns = ("", "steps", "epochs", "examples", "tokens", "share", "padding")
        rows = (
            (
                *(x.name, f"{x.steps:,}", f"{x.epochs:.2f}", f"{x.examples:,.0f}"),
                *(f"{x.real_tokens:,.0f}", f"{x.token_share:.1%}", f"{x.padding:.1%}"),
            )
            for x in self.components
        )
        caption = f"{self.num_steps:,} steps. Share: share of all tokens, not padding."
        return number_table(columns, rows, caption)
