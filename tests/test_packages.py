"""Packages only import packages below them in the table, which a page shows."""

import ast
import graphlib
import importlib
import pathlib
import re
import sys

import pytest

import jaxbucket

ROOT = pathlib.Path(jaxbucket.__file__).parent

# Package or module, from top to bottom -> packages and libraries it may import.
PACKAGES = {
    "__main__": ({"cli"}, set()),
    "cli": (
        {
            *("simulate", "sharding", "sort", "data", "schedule", "packing", "compile"),
            *("plan", "distributed", "base"),
        },
        {"numpy", "click", "rich", "matplotlib"},
    ),
    "simulate": (
        {"schedule", "plan", "optim", "base"},
        {"numpy", "rich", "matplotlib"},
    ),
    "testing": ({"train", "base"}, {"numpy", "jax", "optax", "etils"}),
    "train": (
        {
            *("sharding", "data", "schedule", "compile", "plan", "distributed"),
            *("optim", "attention", "base"),
        },
        {"numpy", "jax", "flax", "optax", "orbax", "etils", "rich", "matplotlib"},
    ),
    "stream": ({"data", "schedule", "packing", "plan", "base"}, {"numpy", "grain"}),
    "sharding": ({"data", "compile", "base"}, {"numpy", "jax"}),
    "sort": ({"schedule", "base"}, {"numpy", "jax"}),
    "data": (
        {"schedule", "packing", "plan", "base"},
        {"numpy", "grain", "absl", "pyarrow", "rich"},
    ),
    "schedule": ({"packing", "plan", "base"}, {"numpy"}),
    "packing": ({"plan", "base"}, {"numpy", "rich"}),
    "compile": ({"plan", "distributed", "base"}, {"numpy", "jax", "jaxlib", "rich"}),
    "plan": ({"base"}, {"numpy", "rich", "matplotlib"}),
    "distributed": ({"base"}, {"jax"}),
    "optim": ({"base"}, {"numpy", "jax", "optax"}),
    "attention": ({"base"}, {"numpy", "jax"}),
    "base": (set(), {"numpy", "ml_dtypes", "rich"}),
}
# Libraries that are too slow to import before they are needed.
LATE = {"rich", "matplotlib", "pyarrow"}


def files(package: str) -> list[pathlib.Path]:
    """Returns the file of a module, or all files of a package."""
    return sorted({*ROOT.glob(f"{package}.py"), *ROOT.glob(f"{package}/**/*.py")})


def imports(tree: ast.AST) -> set[str]:
    """Returns the names of all modules imported below a node.

    Imports for type checking only, and imports on first use in a facade, are left out.
    """
    names = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.With) and "lazy_names" in ast.unparse(node):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (
                parts if node.module in ("jaxbucket", "etils") else {str(node.module)}
            )
        names |= imports(node)
    return names


def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def public_names(facade: pathlib.Path) -> dict[str, str]:
    """Returns the names that a facade exports, name -> module that defines it."""
    return {
        alias.name: str(node.module)
        for block in ast.walk(parse(facade))
        if isinstance(block, ast.With) and "lazy_names" in ast.unparse(block)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


FACADES = sorted(x for x in ROOT.glob("**/__init__.py") if public_names(x))


def test_type_checkers_see_all_names_of_a_facade_as_exported():
    for facade in FACADES:
        for node in ast.walk(parse(facade)):
            if isinstance(node, ast.ImportFrom):
                for name in node.names:
                    assert name.asname in (name.name, "_lazy_names"), name.name


def test_every_package_is_in_the_table():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    names = folders | {path.stem for path in ROOT.glob("*.py")}
    assert names == PACKAGES.keys() | {"__init__"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_its_row_allows(package):
    packages, libraries = PACKAGES[package]
    for path in files(package):
        for name in imports(parse(path)):
            top, *below = name.split(".")
            if top == "jaxbucket":
                assert below[0] in {package, *packages}, f"{path} imports {name}"
            elif top not in sys.stdlib_module_names and name != "etils.epy":
                assert top in libraries, f"{path} imports {name}"


def test_imports_only_go_down():
    order = list(PACKAGES)
    for package, (below, _) in PACKAGES.items():
        assert all(order.index(package) < order.index(name) for name in below), package


def test_a_page_lists_the_packages_in_order():
    page = (ROOT.parent / "docs" / "how_it_works.md").read_text()
    table = page.partition("| package | purpose |")[2]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [
        name for name in PACKAGES if name != "__main__"
    ]


def test_the_folders_of_a_package_do_not_import_each_other_in_a_circle():
    arrows: dict[str, set[str]] = {}
    for path in ROOT.glob("*/**/*.py"):
        folder = ".".join(path.relative_to(ROOT.parent).parent.parts)
        for name in imports(parse(path)):
            module = ROOT.parent.joinpath(*name.split("."))
            target = name if module.is_dir() else name.rpartition(".")[0]
            if target.startswith("jaxbucket.") and target != folder:
                arrows.setdefault(folder, set()).add(target)
    graphlib.TopologicalSorter(arrows).prepare()


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def test_grain_and_jax_are_not_imported_together():
    direct = {module_name(path): imports(parse(path)) for path in ROOT.glob("**/*.py")}
    reached: dict[str, set[str]] = {}

    def libraries(module: str) -> set[str]:
        if module not in reached:
            reached[module] = set()
            for name in direct[module]:
                known = name if name in direct else name.rpartition(".")[0]
                below = libraries(known) if known in direct else {name.split(".")[0]}
                reached[module] |= below
        return reached[module]

    # Only these modules may import both; the commands, each in a function of its own.
    both = ("jaxbucket.train.loader", "jaxbucket.cli", "jaxbucket.__main__")
    for module in direct:
        if not module.startswith(both):
            assert not {"grain", "jax"} <= libraries(module), module
    for package in ("data.pipeline", "data.workers", "stream.dataset"):
        assert "grain" in libraries(f"jaxbucket.{package}")
    for package in ("cli", "train.step", "sharding.mesh", "sort.sorting"):
        assert "jax" in libraries(f"jaxbucket.{package}")


def test_heavy_libraries_are_not_imported_at_module_level():
    for path in ROOT.glob("**/*.py"):
        tree = parse(path)
        inner = ast.FunctionDef | ast.ClassDef
        tree.body = [node for node in tree.body if not isinstance(node, inner)]
        assert not {name.split(".")[0] for name in imports(tree)} & LATE, path


PLANNING = """
import sys
import jaxbucket as jb
plan = jb.plan_buckets([3, 5, 8], max_tokens=16)
schedule = jb.BatchSchedule(plan, [3, 5, 8])
jb.data.collate_rows([{"x": [1, 2]}], schedule[0].bucket)
print(jb.report(plan, [3, 5, 8]).summary)
heavy = {"jax", "jaxlib", "grain", "flax", "optax", "orbax"}
heavy |= {"click", "rich", "matplotlib", "pyarrow"}
print("loaded:", sorted(heavy & sys.modules.keys()))
"""
IMPORT = """
import builtins, sys
original = builtins.__import__
import jaxbucket
assert builtins.__import__ is original
print(*sorted(x for x in sys.modules if x.startswith("jaxbucket.")))
"""


def test_importing_jaxbucket_loads_only_the_facades(python):
    # No facade may be imported later, because the imports of other threads are lazy as
    # well while it is imported.
    run = python("-c", IMPORT)
    facades = {module_name(x) for x in FACADES} - {"jaxbucket"}
    light = {"jaxbucket.base", "jaxbucket.base.lazy", "jaxbucket.base.version"}
    assert set(run.stdout.split()) == facades | light


def test_planning_loads_no_heavy_library(python):
    assert python("-c", PLANNING).stdout.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize("facade", FACADES, ids=lambda path: path.parent.name)
def test_a_facade_exports_documented_names_of_allowed_packages(facade):
    shown = importlib.import_module(module_name(facade))
    package = facade.parent.name
    below = set(PACKAGES) if facade.parent == ROOT else PACKAGES[package][0] | {package}
    for name, module in public_names(facade).items():
        value = getattr(shown, name)
        assert name in dir(shown) and value.__doc__, name
        if module != "jaxbucket":
            assert module.split(".")[1] in below, f"{name} is from {module}"
            assert value is getattr(importlib.import_module(module), name)


def test_every_package_is_an_attribute_of_jaxbucket():
    for package in PACKAGES.keys() - {"__main__", "cli"}:
        assert getattr(jaxbucket, package).__name__ == f"jaxbucket.{package}"


def test_an_unknown_name_raises_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'plan_bucket'"):
        _ = jaxbucket.plan_bucket
