"""Sorting over many hosts, and the difficulty index that is written by it.

`sorting` is the sample sort: `splitters` cut the keys into equal shares, `exchange`
sends each share to its device, by the `collectives` of jax. `difficulty` writes what
was sorted as the index of a curriculum.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.sort.difficulty import write_difficulty_index
    from jaxbucket.sort.sorting import SortedKeys, SortedShare, sample_sort
