"""The folder that executables are kept in, and how it is used.

An executable's file is named by all it depends on: the lowered program with its
constants, the arguments, versions, devices and flags. If any of it has changed, there
is no such file, and the program is compiled.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Literal, TypeAlias, get_args

from jaxbucket.base.checks import check_choice

Verify: TypeAlias = Literal["all", "one", "none"]


@dataclasses.dataclass(frozen=True)
class ExecutableCache:
    """A folder of executables, for `compile_steps(..., executables=)`.

    What is in it is loaded as code: name a folder that only you and those you trust can
    write to. A file that is cut, damaged or foreign is named in a warning, and compiled
    anew; so is one that cannot be written, on a full disk perhaps.

    Example:
      >>> import tempfile
      >>> import jax, numpy as np
      >>> import jaxbucket as jb
      >>> plan, mesh = jb.BucketPlan.from_shapes([(8, 4)]), jb.data_mesh()
      >>> specs = jb.sharding.batch_specs(plan, {"x": np.ones(3, "f4")}, mesh)
      >>> def sum_step(state, batch):
      ...     return state, batch.features["x"].sum()
      >>> state = jb.sharding.replicate(np.int32(0), mesh)
      >>> folder = tempfile.TemporaryDirectory()
      >>> cache = ExecutableCache(folder.name, key="version 1")
      >>> jb.compile_steps(sum_step, state, specs, executables=cache).report
      <1 programs, 1 of them compiled>
      >>> jb.compile_steps(sum_step, state, specs, executables=cache).report
      <1 programs, 0 of them compiled>
      >>> folder.cleanup()

    Attributes:
      folder: made if it is not there.
      verify: how many programs are traced at the start, to compare what they are now
        with what was compiled: "all"; "one" of each function, where a change of code
        that one bucket shows shows in all; "none", where `key` says what the code is.
      key: anything else that executables depend on: a version of your code, say.
      max_gb: the most that the folder holds, in 1e9 bytes; what was not used for
        longest goes first, and what a start needs stays.

    Raises:
      ValueError: for an unknown `verify`, for "none" without a key, for a bound that
        is not positive, and for a folder that is not on a file system.
    """

    folder: str | os.PathLike[str]
    verify: Verify = "all"
    key: str = ""
    max_gb: float = 8.0

    def __post_init__(self):
        check_choice("verify", self.verify, get_args(Verify))
        if not isinstance(self.folder, str | os.PathLike) or "://" in str(self.folder):
            raise ValueError(
                f"`folder={self.folder!r}`: executables are kept on a file system, so "
                "give the path of a folder; mount what is elsewhere."
            )
        if not (isinstance(self.max_gb, int | float) and self.max_gb > 0):
            raise ValueError(f"`max_gb={self.max_gb!r}`: give a positive number.")
        if self.verify == "none" and not self.key:
            raise ValueError(
                "`verify='none'` takes what is in the folder for what your code is: "
                "give a `key` that changes with the code, or choose 'one'."
            )
