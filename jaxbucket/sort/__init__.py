"""Sorting over many hosts: `sample_sort`, and what it gives."""

from jaxbucket.sort.sorting import SortedKeys, SortedShare, sample_sort

__all__ = ["SortedKeys", "SortedShare", "sample_sort"]
