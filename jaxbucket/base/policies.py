"""Names of policies that several packages share."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

# What happens to an example that is longer than the last bucket.
Overlong: TypeAlias = Literal["error", "drop", "truncate", "truncate_left", "split"]
# Whether the micro-batches of a step have the same bucket.
Group: TypeAlias = Literal["same", "mixed"]

OVERLONG: tuple[str, ...] = get_args(Overlong)
# The policies for examples with several sequences, which are not split.
OVERLONG_SEVERAL = tuple(policy for policy in OVERLONG if policy != "split")
# The policies that shorten an example: its beginning or its end is kept.
TRUNCATING: tuple[Overlong, ...] = ("truncate", "truncate_left")
GROUPS: tuple[str, ...] = get_args(Group)
