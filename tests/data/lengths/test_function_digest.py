"""Functions are named by what they do, in every process alike."""

import functools
import subprocess
import sys

import numpy as np
import pytest

from jaxbucket.data.lengths.function_digest import function_name

# What two runs of a script make, and must name alike.
CODE = """
import functools
import numpy as np
from typing import NamedTuple

def add(x, y=1):
    return x + y

def times(n):
    return lambda x: n * len(x)

def again(n):
    def own(x):
        return own(x[1:]) + n if x else 0
    return own

class Scale:
    def __init__(self, by):
        self.by = by
    def __call__(self, x):
        return self.by * len(x)
    def twice(self, x):
        return 2 * self(x)

class Heir(Scale):
    pass

class Slotted:
    __slots__ = ("known",)
    def __init__(self, *known):
        self.known = {*known}
    def __call__(self, x):
        return len(x)

class OtherSlotted(Slotted):
    __slots__ = ()
    def __call__(self, x):
        return sum(x)

class Capped(NamedTuple):
    at: int
    def __call__(self, x):
        return min(self.at, len(x))

class Table(dict):
    def __call__(self, x):
        return self[len(x)]

def cached(n):
    @functools.lru_cache
    def own(x):
        return min(n, x)
    return own

class Cached:
    @functools.lru_cache
    def __call__(self, x):
        return len(x)

class OtherCached:
    @functools.lru_cache
    def __call__(self, x):
        return sum(x)

OtherCached.__qualname__ = "Cached"

def shared(depth):
    # Twice as many paths with each.
    value = []
    for _ in range(depth):
        value = [value, value]
    return lambda x: value

def noted(f):
    f.note = 1
    return f

def empty():
    def own(x):
        return later(x)
    if False:
        later = len
    return own

FUNCTIONS = {
    "plain": add,
    "builtin": len,
    "numpy": np.sum,
    "lambda": lambda x: len(x),
    "other lambda": lambda x: sum(x),
    "attribute": lambda x: x.size,
    "other attribute": lambda x: x.shape,
    "generator": lambda x: sum(1 for _ in x),
    "other generator": lambda x: sum(2 for _ in x),
    "constants": lambda x: x in {"a", "b", "c"},
    "defaults": lambda x, y=2: x + y,
    "other defaults": lambda x, y=3: x + y,
    "closure": times(1),
    "other closure": times(3),
    "recursive": again(1),
    "other recursive": again(2),
    "array": functools.partial(add, y=np.arange(3)),
    "other array": functools.partial(add, y=np.arange(4)),
    "object": Scale(1),
    "other object": Scale(3),
    "method": Scale(1).twice,
    "heir": Heir(1),
    "slots": Slotted("a", "b", "c"),
    "other slots": Slotted("a", "b", "d"),
    "other call": OtherSlotted("a", "b", "c"),
    "named tuple": Capped(1),
    "other named tuple": Capped(2),
    "table": Table({1: 2}),
    "other table": Table({1: 3}),
    "cached": cached(2),
    "other cached": cached(5),
    "cached call": Cached(),
    "other cached call": OtherCached(),
    "of a dict": {"a": {"x", "y", "z"}}.get,
    "shared": shared(60),
    "noted": noted(lambda x: len(x)),
    "empty": empty(),
}
"""
PRINT = """
from jaxbucket.data.lengths.function_digest import function_name
for name, function in FUNCTIONS.items():
    print(function_name(function))
"""


def test_the_same_in_every_process_and_another_for_each(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CODE + PRINT)
    found = [
        subprocess.run(
            [sys.executable, script], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert found[0] == found[1]
    assert len(set(found[0])) == len(found[0]) == 37


def test_partials_have_their_arguments():
    def own(x, k):
        return x + k

    names = [function_name(functools.partial(own, k=k)) for k in (1, 1, 3)]
    assert names[0] == names[1] != names[2]
    assert function_name(np.sum) != function_name(functools.partial(np.sum, axis=0))


def test_what_cannot_be_named_is_said():
    handle = open(__file__)  # noqa: SIM115
    with handle, pytest.raises(ValueError, match="The function holds a TextIOWrapper"):
        function_name(lambda x: handle.read(x))
