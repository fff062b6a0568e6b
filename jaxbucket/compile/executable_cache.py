"""The options of a folder in which executables are saved.

The name of an executable's file depends on everything that the executable depends on:
the lowered program with its constants, the arguments, versions, devices and flags. If
any of these has changed, no file of that name exists, and the program is compiled.
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

    Loading a file can execute arbitrary code, so choose a folder to which only people
    you trust can write. If a file is truncated, damaged or not from jaxbucket, a
    warning names it and the program is compiled again. A warning also names a file that
    cannot be written, for example because the disk is full.

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
      <CompileReport: 1 programs, 1 compiled>
      >>> jb.compile_steps(sum_step, state, specs, executables=cache).report
      <CompileReport: 1 programs, 0 compiled>
      >>> folder.cleanup()

    Attributes:
      folder: the path of the folder. It is created if necessary.
      verify: which programs are traced at launch, to check that the code has not
        changed since they were compiled: "all"; "one" per function, if every change of
        your code affects all buckets; or "none", if `key` identifies your code.
      key: anything else that executables depend on, such as a version of your code.
      max_gb: the maximum size of the folder, in units of 1e9 bytes. The least recently
        used files are removed first, but none that the current run uses.

    Raises:
      ValueError: if `verify` is unknown, or "none" without a `key`; if `max_gb` is not
        positive; or if `folder` is not on a file system.
    """

    folder: str | os.PathLike[str]
    verify: Verify = "all"
    key: str = ""
    max_gb: float = 8.0

    def __post_init__(self):
        check_choice("verify", self.verify, get_args(Verify))
        if not isinstance(self.folder, str | os.PathLike) or "://" in str(self.folder):
            raise ValueError(
                f"`folder={self.folder!r}` must be the path of a folder on a file "
                "system. Mount remote storage to use it."
            )
        if not (isinstance(self.max_gb, int | float) and self.max_gb > 0):
            raise ValueError(f"`max_gb={self.max_gb!r}` must be a positive number.")
        if self.verify == "none" and not self.key:
            raise ValueError(
                "`verify='none'` does not check whether your code has changed. Pass a "
                "`key` that changes with the code, or choose 'one'."
            )
