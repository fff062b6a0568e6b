"""Concatenated examples in memory-mapped arrays, gathered one batch at a time.

A token file is a folder of plain `.npy` files, which numpy can read without this
library: one file for each feature, and `offsets.npy` with the start of each example.
`index.json` describes these files.
"""

from __future__ import annotations

import functools
import os
import pathlib
from typing import Any

from jaxbucket.base.digest import file_digest
from jaxbucket.data.token_index import (
    OFFSETS,
    array_path,
    index_fingerprint,
    map_array,
    read_index,
)
from jaxbucket.data.token_source import TokenSource


class TokenFile(TokenSource):
    """A random-access source that gathers batches without a Python loop over all rows.

    Example:
      >>> import tempfile
      >>> import numpy as np
      >>> from jaxbucket.data.token_writer import write_token_file
      >>> path = tempfile.mkdtemp() + "/corpus"
      >>> examples = [{"tokens": np.arange(n, dtype=np.uint16)} for n in (2, 3)]
      >>> file = write_token_file(path, examples)
      >>> len(file), file.lengths, file[1]["tokens"]
      (2, array([2, 3], dtype=int32), array([0, 1, 2], dtype=uint16))
      >>> from jaxbucket import Bucket
      >>> file.collate(np.array([1, -1]), Bucket(2, 4)).features["tokens"]
      array([[0, 1, 2, 0],
             [0, 0, 0, 0]], dtype=uint16)

    Args:
      path: a folder written by `write_token_file`.

    Attributes:
      path: the absolute path of the folder.
      arrays: the memory-mapped array of each feature.
      num_tokens: the number of tokens of all examples.
      lengths: `[N]` int32, the length of every example, read-only.
      sequences: names of the features with one entry per token.
      fingerprint: 32 hex digits that identify the contents.

    Raises:
      ValueError: if the folder is not a token file, has a different version, or has a
        missing, truncated or changed file. Opening reads only a few pages of each file,
        in constant time; `verify` reads everything.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path).absolute()
        self._index = read_index(self.path)
        self.arrays = {
            name: map_array(array_path(self.path, name), digests)
            for name, digests in self._index["files"].items()
        }
        offsets = self.arrays.pop(OFFSETS)
        self._starts, self._ends = offsets[:-1], offsets[1:]
        self.num_tokens = int(offsets[-1])
        self.files = (self,)
        self.sequences = tuple(self._index["sequences"])

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers map the files again: a pickled memory map would contain all the data.
        return _reopen, (self.path, self.fingerprint)

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {len(self)} examples)"

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits that identify the contents."""
        return index_fingerprint(self._index)

    def verify(self) -> None:
        """Reads all files and compares them with the digests in the index.

        Raises:
          ValueError: if a file has changed.
        """
        for name, digests in self._index["files"].items():
            path = array_path(self.path, name)
            if file_digest(path) != digests["all"]:
                raise ValueError(
                    f"{path} has changed since it was written. Write the token file "
                    "again."
                )


def _reopen(path: pathlib.Path, fingerprint: str) -> TokenFile:
    """Opens the file again in a worker and checks that it is unchanged."""
    file = TokenFile(path)
    if file.fingerprint != fingerprint:
        raise ValueError(
            f"{path} has changed since it was opened. Open it again, and measure the "
            "lengths again."
        )
    return file
