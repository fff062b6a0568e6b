"""Sources made of examples of other sources: selected, concatenated, or zipped."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import selected_indices
from jaxbucket.base.digest import digest
from jaxbucket.base.padding import PadValue, named_pad_values
from jaxbucket.base.sizes import Sizes
from jaxbucket.data.source import Source, check_index, fingerprints
from jaxbucket.data.token_source import TokenSource, concatenated


def select(source: Source, selected: ArrayLike) -> Source:
    """Returns the selected examples of a source, to train on a part of it.

    Select by a condition on lengths or other metrics, and plan with the lengths of the
    same examples. If the source gathers whole batches, as a token file does, so does
    the selection.

    Example:
      >>> source = [{"x": [1]}, {"x": [1, 2, 3]}, {"x": []}, {"x": [1, 2]}]
      >>> lengths = np.array([1, 3, 0, 2])
      >>> kept = lengths >= 2
      >>> part = select(source, kept)
      >>> len(part), part[1], lengths[kept].tolist()
      (2, {'x': [1, 2]}, [3, 2])

    Args:
      source: random-access source of N examples.
      selected: `[N]` bool, whether each example is selected; or `[M]` integers, the
        indices of the examples in their new order. An index may occur several times.

    Returns:
      A source of M examples. Its fingerprint depends on the selection, so that a run
      does not resume with a different one.

    Raises:
      ValueError: if no example is selected, or `selected` is neither `[N]` bool nor
        valid indices.
    """
    indices = selected_indices("selected", selected, len(source))
    if isinstance(source, ZippedSource):
        return ZippedSource([file.view(indices) for file in source.sources])
    if isinstance(source, TokenSource):
        return source.view(indices)
    return _View([source], np.zeros(len(indices), int), indices)


def concatenate(sources: Sequence[Source]) -> Source:
    """Concatenates several sources, for a `Mixture` or for one schedule over all.

    If all sources gather whole batches, as token files do, so does the returned source.

    Example:
      >>> both = concatenate([["a", "b"], ["c"]])
      >>> len(both), both[2]
      (3, 'c')

    Args:
      sources: one or more sources, whose examples have the same features.

    Returns:
      A source of the examples of the first source, followed by those of the next ones.

    Raises:
      ValueError: if `sources` is empty, or if token files differ in features, dtypes or
        trailing shapes.
    """
    sources = list(sources)
    if not sources:
        raise ValueError("`sources` is empty. Pass at least one source.")
    if all(isinstance(source, ZippedSource) for source in sources):
        columns = zip(*(cast(Any, x).sources for x in sources), strict=True)
        return ZippedSource([concatenated(column) for column in columns])
    if all(isinstance(source, TokenSource) for source in sources):
        return concatenated(cast(list[TokenSource], sources))
    sizes = list(map(len, sources))
    which = np.repeat(np.arange(len(sizes)), sizes)
    return _View(sources, which, np.concatenate([*map(np.arange, sizes)]))


def zip_sources(sources: Sequence[TokenSource]) -> ZippedSource:
    """Zips token files of one sequence each into a source of several sequences.

    Batches are gathered from each file without a loop over examples.

    Example:
      >>> import tempfile
      >>> from jaxbucket.data.token_file import write_token_file
      >>> folder = tempfile.mkdtemp()
      >>> pairs = [{"source": [5, 6, 7], "target": [8]}, {"source": [9], "target": [4]}]
      >>> files = [
      ...     write_token_file(f"{folder}/{name}", ({name: x[name]} for x in pairs))
      ...     for name in ("source", "target")
      ... ]
      >>> zipped = zip_sources(files)
      >>> zipped.lengths["source"].tolist(), zipped[1]
      ([3, 1], {'source': array([9]), 'target': array([4])})

    Args:
      sources: two or more token files, or views of them, with the same number of
        examples and different features.

    Returns:
      The source. Plan with its `lengths`, and pass it to `MeshLoader`.

    Raises:
      ValueError: if there are fewer than two sources, one is not a token file, they
        have different numbers of examples, or they share a feature.
    """
    sources = list(sources)
    sizes = [len(x) if isinstance(x, TokenSource) else None for x in sources]
    if len(sources) < 2 or len(set(sizes)) > 1 or None in sizes:
        raise ValueError(
            f"`sources` are {sources}. Pass two or more token files with as many "
            "examples each."
        )
    features = [name for source in sources for name in source[0]]
    if repeated := sorted({x for x in features if features.count(x) > 1}):
        raise ValueError(
            f"`sources` share the features {repeated}. Write each file with features "
            "of its own, such as 'source' and 'target'."
        )
    return ZippedSource(sources)


class ZippedSource:
    """Examples with the features of several sources, as created by `zip_sources`.

    Attributes:
      sources: the sources, one for each sequence.
      lengths: the lengths `[N]` of each sequence, by name.
      features: the features of each sequence, which share its length.
    """

    def __init__(self, sources: Sequence[TokenSource]):
        self.sources = list(sources)
        self._by_name = {source.sequences[0]: source for source in sources}
        names = sorted(self._by_name)
        self.lengths = {name: self._by_name[name].lengths for name in names}
        self.features = {name: [*x.sequences] for name, x in self._by_name.items()}

    @property
    def fingerprint(self) -> str:
        """A digest of the fingerprints of the sources."""
        return digest(fingerprints(self.sources).encode())

    def __len__(self) -> int:
        return len(self.sources[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: x for source in self.sources for name, x in source[index].items()}

    def collate(
        self,
        rows: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue = 0,
        truncate: Collection[str] = (),
        truncate_left: Collection[str] = (),
    ) -> Batch:
        """Returns the batch that `collate_rows` would return for these examples.

        Args:
          rows, pad_value: as for `TokenSource.collate`.
          bucket: the shape, with a T for each sequence.
          truncate, truncate_left: the sequences that keep their first or last tokens.
        """
        names = [name for source in self.sources for name in source.sequences]
        pads = named_pad_values(pad_value, names)
        batches = [
            source.collate(
                rows,
                Bucket(bucket.batch_size, cast(Sizes, bucket.seq_len)[name]),
                pad_value={x: pads.get(x, 0) for x in source.sequences},
                truncate=name in truncate,
                truncate_left=name in truncate_left,
            )
            for name, source in self._by_name.items()
        ]
        dicts = zip(*batches, strict=True)
        return Batch(*({k: v for x in each for k, v in x.items()} for each in dicts))


class _View:
    """Examples of several sources: example i is `indices[i]` of `sources[which[i]]`."""

    def __init__(
        self, sources: Sequence[Source], which: np.ndarray, indices: np.ndarray
    ):
        self._sources, self._which, self._indices = sources, which, indices

    @property
    def fingerprint(self) -> str:
        arrays = (x.astype("<i8").data for x in (self._which, self._indices))
        return digest(fingerprints(self._sources).encode(), *arrays)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        index = check_index(self, index)
        return self._sources[self._which[index]][int(self._indices[index])]
