"""Checks of the components of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxbucket.schedule.batch_schedule import BatchSchedule
from jaxbucket.schedule.orders import Order


def check_names(argument: str, names: Sequence[Any]) -> None:
    """Checks the names of components.

    Args:
      argument: the argument with the names, for messages.
      names: the names.

    Raises:
      ValueError: if a name is not a string.
    """
    for name in names:
        if not isinstance(name, str):
            raise ValueError(
                f"`{argument}` has the name {name!r}, which is not a string. Pass "
                "strings as names."
            )


def check_components(schedules: Sequence[Any], names: Sequence[str], by: str) -> None:
    """Checks the components of a mixture.

    Args:
      schedules: the components.
      names: their names; empty if they have none.
      by: the quantity that is proportional to the weights.

    Raises:
      ValueError: if a component cannot be part of a mixture, or components without
        names differ in their sequences or in whether rows are packed.
    """
    for key, schedule in zip(names or range(len(schedules)), schedules, strict=True):
        _check_component(f"schedules[{key!r}]", schedule, by)
    if not names:
        _check_same_rows(schedules)


def _check_component(label: str, schedule: Any, by: str) -> None:
    if not isinstance(schedule, BatchSchedule):
        raise ValueError(
            f"`{label}` is a {type(schedule).__name__}, not a `BatchSchedule`. Instead "
            "of a mixture, pass its components."
        )
    order = schedule.order
    if by != "steps" and isinstance(order, Order) and order.replacement:
        raise ValueError(
            f"`by={by!r}` requires that an epoch of each component has every example "
            f"once, but `{label}` draws with `replacement=True`. Use `by='steps'`."
        )


def _check_same_rows(schedules: Sequence[BatchSchedule]) -> None:
    """Checks that the rows of all components have the same structure."""
    sequences = [schedule.sequences for schedule in schedules]
    if len(set(sequences)) > 1:
        raise ValueError(
            f"`schedules` have different sequences: {sequences}. Pass a mapping from "
            "names to schedules, and one from names to sources to the loader."
        )
    if len({x.packing is None for x in schedules}) > 1:
        raise ValueError(
            "`schedules` have both packed rows and rows of one example. Pack all "
            "components or none, or pass a mapping from names to schedules, and one "
            "from names to sources to the loader."
        )
