"""Sorts keys over many hosts, and writes the difficulty index of a curriculum.

`sorting` implements the sample sort: `splitters` divides the keys into equal shares,
and `exchange` sends each share to its device by the `collectives` of jax. `difficulty`
writes the sorted examples as an index.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.sort.difficulty import write_difficulty_index
    from jaxbucket.sort.sorting import SortedKeys, SortedShare, sample_sort
