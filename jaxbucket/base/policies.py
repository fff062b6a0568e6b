"""Policies that several packages share: their names, and a check."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias, get_args

from jaxbucket.base.checks import check_choice
from jaxbucket.base.sizes import PerSequence, check_same_sequences

# What happens to an example that is longer than the last bucket.
Overlong: TypeAlias = Literal["error", "drop", "truncate", "truncate_left", "split"]
# Whether the micro-batches of a step have the same bucket.
Group: TypeAlias = Literal["same", "mixed"]

OVERLONG: tuple[str, ...] = get_args(Overlong)
# The policies that shorten an example: its beginning or its end is kept.
TRUNCATING: tuple[Overlong, ...] = ("truncate", "truncate_left")
GROUPS: tuple[str, ...] = get_args(Group)


def checked_overlong(overlong: Any, sequences: Collection[str], others: str) -> Any:
    """Returns the policy for examples that are too long, or that for each sequence.

    Equal policies of all sequences are one policy. `sequences` and `others` are those
    of `check_same_sequences`.
    """
    # Examples with several sequences are not split.
    known = OVERLONG[:-1] if sequences else OVERLONG
    if not isinstance(overlong, Mapping):
        check_choice("overlong", overlong, known)
        return overlong
    check_same_sequences("overlong", overlong, sequences, others)
    for name, policy in overlong.items():
        check_choice(f"overlong[{name!r}]", policy, known)
    policies = set(overlong.values())
    return policies.pop() if len(policies) == 1 else PerSequence(overlong, "overlong")
