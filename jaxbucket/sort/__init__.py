"""Sorts keys over many hosts, and writes the difficulty index of a curriculum.

`sorting` implements the sample sort: `splitters` divides the keys into equal shares,
and `exchange` sends each share to its device by the `collectives` of jax. `index_files`
writes the sorted examples as an index.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.sort.index_files import (
        write_difficulty_index as write_difficulty_index,
    )
    from jaxbucket.sort.sorting import SortedShare as SortedShare
    from jaxbucket.sort.sorting import sample_sort as sample_sort
