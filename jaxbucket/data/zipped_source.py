"""Zips sources of one sequence each into a source of several sequences."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.digest import digest
from jaxbucket.base.padding import PadValue, pad_arrays
from jaxbucket.base.sizes import Sizes
from jaxbucket.data.example import Sequences, as_arrays
from jaxbucket.data.sequence_axes import features_by_sequence
from jaxbucket.data.source import RowSource, SpanSource, fingerprints, gathers


def zip_sources(sources: Sequence[RowSource]) -> ZippedSource:
    """Zips token files of one sequence each into a source of several sequences.

    Batches are gathered from each file without a loop over examples.

    Example:
      >>> import tempfile
      >>> from jaxbucket.data.token_file_writer import write_token_file
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
      sources: two or more token files, or other sources that gather whole batches, with
        the same number of examples and different features.

    Returns:
      The source. Plan with its `lengths`, and pass it to `MeshLoader`.

    Raises:
      ValueError: if there are fewer than two sources, one does not gather whole
        batches, they have different numbers of examples, or they share a feature.
    """
    sources = list(sources)
    if len(sources) < 2:
        raise ValueError(f"`sources` has {len(sources)} entries. Pass at least two.")
    for number, source in enumerate(sources):
        if not isinstance(source, RowSource):
            raise ValueError(
                f"`sources[{number}]` is a {type(source).__name__}, which does not "
                "gather whole batches. Pass token files (`write_token_file`), or one "
                "source of examples with all features."
            )
    sizes = [len(source) for source in sources]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"`sources` have {sizes} examples. Pass sources with the same number."
        )
    features = [name for source in sources for name in as_arrays(source[0])]
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
    """

    def __init__(self, sources: Sequence[RowSource]):
        self.sources = list(sources)
        self._sources = {source.sequences[0]: source for source in sources}
        self._dtypes = {
            name: as_arrays(source[0])[name].dtype
            for source in sources
            for name in source.sequences
        }

    @property
    def lengths(self) -> dict[str, np.ndarray]:
        """The lengths `[N]` of each sequence, by name."""
        names = sorted(self._sources)
        return {name: self._sources[name].lengths for name in names}

    @property
    def features(self) -> dict[str, list[str]]:
        """The features of each sequence, which share its length."""
        return {name: list(x.sequences) for name, x in self._sources.items()}

    @property
    def fingerprint(self) -> str:
        """A digest of the fingerprints of the sources."""
        return digest(fingerprints(self.sources).encode())

    def __len__(self) -> int:
        return len(self.sources[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        examples = (source[index] for source in self.sources)
        return {name: value for x in examples for name, value in x.items()}

    def check_features(self, sequences: Sequences) -> None:
        """Raises a ValueError if the features of the sequences are others."""
        names = list(self._sources)
        groups = features_by_sequence(sequences, names, names)
        for features in groups.values():
            if shared := [name for name, axis in features.items() if axis]:
                raise ValueError(
                    f"`sequences={sequences}` lists {shared} for several sequences, "
                    "but token files hold features with one sequence axis. Pass a "
                    "source of examples with all features instead."
                )
        if {x: set(y) for x, y in groups.items()} != {
            x: set(y) for x, y in self.features.items()
        }:
            features = {name: list(x) for name, x in groups.items()}
            raise ValueError(
                f"`sequences={features}`, but the source has {self.features}. "
                "Remove `sequences`, or write the files with these sequences."
            )

    def gathers(self, packed: bool, left: Collection[str]) -> bool:
        """Returns whether all batches of a schedule can be gathered.

        Args:
          packed: whether rows hold several examples.
          left: the sequences that are truncated on the left.
        """
        pairs = self._sources.items()
        return all(gathers(source, packed, name in left) for name, source in pairs)

    def collate_sequences(
        self,
        rows: np.ndarray,
        bucket: Bucket,
        *,
        pad_value: PadValue,
        truncate: Collection[str],
        truncate_left: Collection[str],
    ) -> Batch:
        """Returns the batch that `collate_rows` would return for these examples.

        Args:
          rows: `[B]` or `[B, max_segments]` integers, -1 for an empty entry.
          bucket: the shape, with a T for each sequence.
          pad_value: as for `collate_rows`.
          truncate: the sequences that keep their first tokens.
          truncate_left: the sequences that keep their last tokens.
        """
        pads = pad_arrays(pad_value, self._dtypes)
        batches = []
        for name, source in self._sources.items():
            seq_len = cast(Sizes, bucket.seq_len)[name]
            part = Bucket(bucket.batch_size, seq_len)
            values = {x: pads[x].item() for x in source.sequences}
            if name in truncate_left:
                lengths = source.lengths[rows]
                kept = np.minimum(lengths, seq_len)
                batch = cast(SpanSource, source).collate_spans(
                    rows, lengths - kept, kept, part, pad_value=values
                )
            else:
                batch = source.collate(
                    rows, part, pad_value=values, truncate=name in truncate
                )
            batches.append(batch)
        return Batch(*(_merged(dicts) for dicts in zip(*batches, strict=True)))


def _merged(dicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for x in dicts for name, value in x.items()}
