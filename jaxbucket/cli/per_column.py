"""Options with a value for each of several columns."""

from __future__ import annotations

from typing import Any

import click


class PerColumn(click.ParamType):
    """A value, or one for each of several columns: source=512,target=128.

    Args:
      each: the type of the value of a column.
      single: the type of a value for all columns; by default the same.
    """

    def __init__(self, each: click.ParamType, single: click.ParamType | None = None):
        self.name = each.name
        self._each, self._single = each, single or each

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        return self._single.get_metavar(param, ctx)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str) or "=" not in value:
            return self._single.convert(value, param, ctx)
        # Names of columns may contain "=".
        parts = [part.rpartition("=") for part in value.split(",")]
        values = {
            name.strip(): self._each.convert(text.strip(), param, ctx)
            for name, _, text in parts
        }
        if len(values) < len(parts):
            self.fail(f"{value!r} names a column twice.", param, ctx)
        return values
