"""A function together with the shapes of its arguments."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

from jaxbucket.base.bucket import Bucket
from jaxbucket.compile.flops import count_flops
from jaxbucket.compile.jax_settings import with_prng_in_cache_keys

# A bucket, or the name of a phase that all buckets share.
Label: TypeAlias = Bucket | str


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to be compiled.

    Attributes:
      label: its bucket or phase.
      fn: a jitted function.
      args: the arguments, or their shapes, dtypes and shardings.
    """

    label: Label
    fn: Any
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.fn, "__name__", "step")

    def lower(self) -> tuple[Any, int | None]:
        """Returns the lowered function and its number of operations, if known."""
        # Other processes may load the executable, so it must not be traced from a
        # cached function with a different PRNG implementation.
        with with_prng_in_cache_keys():
            if not hasattr(self.fn, "trace"):
                return self.fn.lower(*self.args), None
            traced = self.fn.trace(*self.args)
            return traced.lower(), count_flops(traced.jaxpr)
