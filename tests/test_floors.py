"""Imports only go down: the building that the README's table promises."""

import ast
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

import jaxbucket

PACKAGE = pathlib.Path(jaxbucket.__file__).parent

# Room -> (rooms it may import, what it may import from outside). A new room is
# entered here; it finds its floor by what it needs.
ROOMS = {
    "checks": (set(), {"numpy"}),
    "progress": (set(), {"rich"}),
    "base": ({"checks"}, {"numpy"}),
    "chunks": ({"checks"}, {"numpy"}),
    "permutation": (set(), {"numpy"}),
    "example_draws": (set(), {"numpy"}),
    "opening": ({"checks", "base"}, {"numpy"}),
    "position": ({"checks"}, set()),
    "remainder": ({"checks", "base"}, {"numpy"}),
    "costs": ({"checks", "base"}, {"numpy", "scipy"}),
    "boundaries": ({"remainder"}, {"numpy"}),
    "bounds": ({"boundaries", "remainder"}, {"numpy"}),
    "search": ({"bounds"}, {"numpy"}),
    "dense": ({"bounds"}, {"numpy"}),
    "optimal": (
        {"boundaries", "bounds", "dense", "remainder", "search"},
        {"numpy"},
    ),
    "histogram": ({"base", "chunks"}, {"numpy"}),
    "pattern": (set(), set()),
    "best_fit": ({"pattern"}, {"numpy"}),
    "fullest_rows": ({"pattern"}, {"numpy"}),
    "sequences": ({"checks"}, {"numpy"}),
    "fit_sequences": (set(), {"numpy"}),
    "kinds": (set(), {"numpy"}),
    "pooled_rows": ({"checks", "fit_sequences", "permutation"}, {"numpy"}),
    "packing": (
        {
            *("checks", "base", "best_fit", "fit_sequences", "fullest_rows"),
            *("histogram", "kinds", "pattern", "pooled_rows", "sequences"),
            "progress",
        },
        {"numpy"},
    ),
    "even_work": (set(), {"numpy"}),
    "packed_rows": ({"base", "even_work", "packing", "permutation"}, {"numpy"}),
    "segments": (set(), {"numpy"}),
    "limits": ({"checks", "base", "boundaries", "costs", "histogram"}, {"numpy"}),
    "curve": (
        {
            "checks",
            "base",
            "boundaries",
            "costs",
            "limits",
            "optimal",
            "remainder",
            "progress",
        },
        {"numpy", "rich"},
    ),
    "plan": (
        {
            "checks",
            "base",
            "boundaries",
            "costs",
            "curve",
            "limits",
            "optimal",
            "progress",
        },
        {"numpy"},
    ),
    "stats": ({"checks", "base", "chunks", "remainder"}, {"numpy", "rich"}),
    "packed_plan": (
        {
            *("checks", "base", "costs", "histogram", "limits", "packing", "pattern"),
            "plan",
            *("remainder", "stats"),
            "progress",
        },
        {"numpy", "rich"},
    ),
    "comparison": (
        {
            "checks",
            "base",
            "limits",
            "optimal",
            "plan",
            "remainder",
            "stats",
            "progress",
        },
        {"numpy", "rich"},
    ),
    "pacing": (set(), set()),
    "grouping": ({"base"}, {"numpy"}),
    "epoch_rows": ({"base", "grouping", "remainder"}, {"numpy"}),
    "orders": ({"epoch_rows", "opening", "permutation"}, {"numpy"}),
    "difficulty_index": ({"base"}, {"numpy"}),
    "curriculum": (
        {
            *("base", "difficulty_index", "epoch_rows", "opening", "orders"),
            *("pacing", "permutation"),
        },
        {"numpy"},
    ),
    "schedule": (
        {
            *("checks", "base", "opening", "position", "remainder", "stats"),
            *("epoch_rows", "example_draws", "orders", "curriculum"),
            *("even_work", "packing", "packed_rows", "sequences"),
        },
        {"numpy"},
    ),
    "mixture": ({"checks", "base", "example_draws", "schedule"}, {"numpy"}),
    "example": (set(), {"numpy"}),
    "transform": ({"example", "example_draws"}, {"numpy"}),
    "collate": (
        {"checks", "base", "example", "padding", "segments", "sequences"},
        {"numpy"},
    ),
    "source": ({"base", "collate", "example", "padding"}, {"numpy"}),
    "padding": (set(), {"numpy", "ml_dtypes"}),
    "chunk_source": (
        {"checks", "base", "chunks", "collate", "padding", "source"},
        {"numpy"},
    ),
    "concat_source": (
        {"checks", "base", "packing", "permutation", "source"},
        {"numpy"},
    ),
    "function_name": ({"base"}, set()),
    "orphans": (set(), set()),
    "token_index": ({"base"}, {"numpy"}),
    "token_file": (
        {
            *("checks", "base", "collate", "example", "padding", "segments"),
            "token_index",
        },
        {"numpy"},
    ),
    "length_cache": (set(), {"numpy"}),
    "meeting": (set(), set()),
    "measuring": (
        {
            *("checks", "base", "example", "source"),
            *("function_name", "length_cache", "meeting", "orphans", "progress"),
        },
        {"numpy", "cloudpickle"},
    ),
    "input_pipeline": (
        {
            *("checks", "base", "example_draws", "position", "schedule", "collate"),
            *("chunk_source", "concat_source", "example", "padding", "source"),
            "transform",
        },
        {"numpy", "grain"},
    ),
    "bucket_sequence": ({"base", "packing", "permutation"}, {"numpy"}),
    "drift": (
        {"base", "best_fit", "histogram", "packed_plan", "pattern", "plan", "stats"},
        {"numpy"},
    ),
    "stream_end": ({"checks", "base"}, set()),
    "stream_arrivals": ({"base", "example", "transform"}, {"numpy", "grain"}),
    "stream_pool": ({"base", "remainder", "stream_arrivals"}, set()),
    "stream_packing": ({"base", "stream_arrivals"}, set()),
    "stream_run": (
        {
            *("checks", "base", "bucket_sequence", "drift", "example", "packing"),
            *("meeting", "padding", "permutation", "stats", "stream_packing"),
            *("stream_pool", "transform"),
        },
        {"numpy", "grain"},
    ),
    "stream_standing": ({"example"}, {"numpy"}),
    "stream_rounds": (
        {
            *("base", "example", "meeting", "remainder", "stream_pool", "stream_run"),
            "stream_standing",
        },
        {"numpy"},
    ),
    "stream_state": (
        {"example", "position", "stream_arrivals", "stream_rounds"},
        {"numpy"},
    ),
    "stream_iterator": (
        {
            *("base", "collate", "drift", "example", "remainder", "stream_arrivals"),
            *("stream_pool", "stream_rounds", "stream_run", "stream_state"),
        },
        {"numpy", "grain"},
    ),
    "streaming": (
        {
            *("checks", "base", "drift", "example", "meeting", "permutation"),
            *("padding", "position", "stream_arrivals", "stream_iterator"),
            *("stream_run", "transform"),
        },
        {"numpy", "grain"},
    ),
    "workers": ({"checks", "orphans"}, {"absl", "grain", "numpy"}),
    "sharding": ({"checks", "base", "collate", "example"}, {"numpy", "jax"}),
    "compile": (
        {"checks", "base", "padding", "coordination", "progress"},
        {"numpy", "jax", "jaxlib", "rich"},
    ),
    "calibration": (
        {
            *("checks", "base", "collate", "compile", "costs", "example"),
            *("limits", "progress", "sharding"),
        },
        {"numpy", "jax"},
    ),
    "optim": ({"checks"}, {"numpy", "jax", "optax"}),
    "sort": (set(), {"numpy", "jax"}),
    "masks": ({"checks", "base"}, {"numpy", "jax"}),
    "blockwise": (set(), {"jax"}),
    "splash": (set(), {"jax"}),
    "attention": ({"checks", "blockwise", "splash"}, {"jax"}),
    "difficulty": (
        {"checks", "difficulty_index", "meeting", "sort"},
        {"numpy", "jax"},
    ),
    "rows": ({"base"}, {"jax"}),
    "pmap": ({"base", "compile", "rows"}, {"numpy", "jax"}),
    "loss": (
        {"checks", "base", "sharding", "pmap", "rows"},
        {"numpy", "jax", "flax"},
    ),
    "train": (
        {"checks", "base", "compile", "loss", "optim", "sharding", "pmap", "rows"},
        {"numpy", "jax", "flax", "optax"},
    ),
    "accumulation": (
        {
            *("checks", "base", "compile", "loss", "optim"),
            *("sharding", "pmap", "train"),
        },
        {"jax", "optax"},
    ),
    "testing": (
        {"checks", "base", "loss", "rows", "train"},
        {"numpy", "jax", "optax"},
    ),
    "prediction": (
        {
            *("checks", "base", "collate", "compile", "progress", "schedule"),
            *("loss", "sharding", "pmap", "train"),
        },
        {"numpy", "jax"},
    ),
    "coordination": (set(), {"jax"}),
    "rendezvous": (set(), set()),
    "last_words": (set(), set()),
    "handover": ({"last_words", "rendezvous"}, set()),
    "watchdog": ({"coordination", "last_words"}, {"jax"}),
    "processes": (
        {
            *("__version__", "checks", "position", "coordination", "last_words"),
            *("rendezvous", "handover", "watchdog"),
        },
        {"jax"},
    ),
    "preemption": ({"processes"}, {"jax"}),
    "checkpoint": (
        {"checks", "position", "processes", "rendezvous"},
        {"numpy", "jax", "orbax", "etils"},
    ),
    "length_files": (
        {"checks", "example", "source", "measuring", "progress"},
        {"numpy", "rich", "grain", "pyarrow"},
    ),
    "plots": ({"checks", "base", "stats"}, {"numpy", "matplotlib"}),
    "comparison_plots": (
        {"comparison", "curve", "plots", "stats"},
        {"numpy", "matplotlib"},
    ),
    "precompile": ({"base", "compile"}, set()),
    "cli": (
        {
            *("base", "costs", "remainder", "limits", "curve", "plan", "stats"),
            *("comparison", "length_files", "plots", "comparison_plots"),
            *("compile", "precompile"),
        },
        {"numpy", "click", "rich", "matplotlib"},
    ),
    "__main__": ({"cli"}, set()),
}
# The version, of the package itself.
NOT_IN_THE_TABLE = {"__version__"}
# Too heavy for planning on a laptop: never imported before they are used.
LATE = {"rich", "matplotlib", "pyarrow"}


def imports(tree: ast.AST) -> set[str]:
    """Every module imported below a node, but for those that only types need."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # `from jaxbucket import boundaries` imports a room.
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= parts if node.module == "jaxbucket" else {str(node.module)}
        found |= imports(node)
    return found


def parse(room: str) -> ast.Module:
    """A room's file, or all files of its folder as one."""
    paths = sorted(PACKAGE.glob(f"{room}.py")) + sorted(PACKAGE.glob(f"{room}/*.py"))
    return ast.parse("\n".join(path.read_text() for path in paths))


def test_every_room_has_its_floor():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert folders | files == {"__init__", *ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_its_floor_allows(room):
    rooms, libraries = ROOMS[room]
    for name in imports(parse(room)):
        top, *below = name.split(".")
        if top == "jaxbucket":
            assert below[0] in {room, *rooms}, f"{room} imports {name}"
        elif top not in sys.stdlib_module_names:
            assert top in libraries, f"{room} imports {name}"


@pytest.mark.parametrize("room", ROOMS)
def test_heavy_libraries_are_imported_where_they_are_used(room):
    tree = parse(room)
    top = ast.Module([x for x in tree.body if not isinstance(x, ast.FunctionDef)], [])
    top.body = [x for x in top.body if not isinstance(x, ast.ClassDef)]
    assert not {name.split(".")[0] for name in imports(top)} & LATE


def test_the_table_has_no_cycle():
    left = {room: set(rooms) for room, (rooms, _) in ROOMS.items()}
    while left:
        free = {room for room, rooms in left.items() if not rooms & left.keys()}
        assert free, f"cycle among {sorted(left)}"
        left = {room: rooms for room, rooms in left.items() if room not in free}


def test_rooms_of_the_readme_stand_in_the_order_of_their_imports():
    readme = (PACKAGE.parent / "README.md").read_text()
    table = readme.partition("## What is where")[2]
    lines = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    order = [name for line in lines for name in re.findall(r"`(\w+)`", line)]
    assert sorted(order) == sorted(ROOMS.keys() - {"__main__"})
    for place, room in enumerate(order):
        above = {*order[:place], *NOT_IN_THE_TABLE}
        assert ROOMS[room][0] <= above, f"{room} imports what is below it"


def libraries_of(room: str) -> set[str]:
    """What it imports, and what the rooms do that it imports."""
    rooms, libraries = ROOMS.get(room, (set(), set()))
    return libraries.union(*map(libraries_of, rooms))


def test_the_wings_of_grain_and_of_jax_do_not_know_each_other():
    of_both = [room for room in ROOMS if {"grain", "jax"} <= libraries_of(room)]
    assert of_both == ["cli", "__main__"]
    for room in ("input_pipeline", "workers", "streaming", "length_files"):
        assert "grain" in libraries_of(room)


PLANNING = """
import sys
import jaxbucket as jb
plan = jb.plan_buckets([3, 5, 8], max_tokens=16)
schedule = jb.BatchSchedule(plan, [3, 5, 8])
jb.collate_rows([{"x": [1, 2]}], schedule[0].bucket)
print(jb.report(plan, [3, 5, 8]).summary)
heavy = {"jax", "jaxlib", "grain", "flax", "optax", "orbax"}
heavy |= {"click", "rich", "matplotlib", "pyarrow"}
print("loaded:", sorted(heavy & sys.modules.keys()))
"""


def test_planning_loads_numpy_alone():
    run = subprocess.run(
        [sys.executable, "-c", PLANNING], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == "loaded: []"


def test_every_public_name_is_there():
    for name in jaxbucket.__all__:
        assert getattr(jaxbucket, name) is not None
    assert set(jaxbucket.__all__) <= set(dir(jaxbucket))
    assert sorted(jaxbucket.__all__) == jaxbucket.__all__


def test_names_for_first_use_are_those_for_type_checkers():
    tree = parse("__init__")
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    late = jaxbucket._ON_FIRST_USE
    assert typed == {name: f"jaxbucket.{room}" for name, room in late.items()}
    assert late.keys() <= set(jaxbucket.__all__)
    for name, room in late.items():
        module = importlib.import_module(f"jaxbucket.{room}")
        assert getattr(jaxbucket, name) is getattr(module, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'plan_bucket'"):
        _ = jaxbucket.plan_bucket
