"""Says why a folder of executables has none for a job."""

from collections.abc import Mapping, Sequence
from typing import Any

_MAX_LENGTH, _MAX_FACTS = 80, 3


def why_missing(saved: Sequence[Any], facts: Mapping[str, str]) -> str:
    """Returns how a job differs from the most similar of the manifests.

    Example:
      >>> one = {"processes": "1 process", "jax": "jax 0.12.0"}
      >>> saved = [{"facts": one, "programs": {"[8, 4]": "abc"}}]
      >>> why_missing(saved, one | {"processes": "2 processes"})
      '1 program for 1 process, jax 0.12.0; this job has 2 processes'
    """

    def differing(theirs: Mapping[str, str]) -> list[str]:
        return [x for x in {**facts, **theirs} if facts.get(x) != theirs.get(x)]

    closest = min(saved, key=lambda manifest: len(differing(manifest["facts"])))
    theirs, count = closest["facts"], len(closest["programs"])
    names = differing(theirs)[:_MAX_FACTS]
    # The first two are named in any case.
    had = [
        theirs[x] for x in dict.fromkeys(["processes", "jax", *names]) if x in theirs
    ]
    has = [facts[x] for x in names if x in facts]
    had, has = (", ".join(x[:_MAX_LENGTH] for x in y) for y in (had, has))
    end = f"this job has {has}" if has else "their code or settings differ"
    return f"{count} program{'s' * (count > 1)} for {had}; {end}"
