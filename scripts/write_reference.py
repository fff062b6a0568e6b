"""Writes docs/reference.md: every public name and the first sentence of its docstring.

python scripts/write_reference.py
"""

import inspect
import pathlib
import re
import types

import jaxbucket as jb

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "reference.md"
PREAMBLE = """\
# Reference

Every public name and the first sentence of its docstring; `help(jb.plan_buckets)` shows
the rest. The names of the ordinary training loop are at `jb` as well.
This page is written by `python scripts/write_reference.py`.
"""


def main() -> None:
    PAGE.write_text(reference())


def reference() -> str:
    """Returns the whole page."""
    packages = {
        f"jb.{name}": module
        for name in dir(jb)
        if name != "cli"
        and inspect.ismodule(module := getattr(jb, name))
        and public_names(module)
    }
    top = set(public_names(jb))
    elsewhere = {name for module in packages.values() for name in public_names(module)}
    sections = [section("jb", jb, sorted(top - elsewhere), top)]
    for title, module in packages.items():
        sections.append(section(title, module, public_names(module), top))
    return "\n".join([PREAMBLE, *sections])


def section(
    title: str, module: types.ModuleType, names: list[str], top: set[str]
) -> str:
    rows = []
    for name in names:
        package = "jb" if name in top else title
        rows.append(f"| `{package}.{name}` | {first_sentence(getattr(module, name))} |")
    about = first_sentence(module)
    return "\n".join(
        [f"## `{title}`\n", f"{about}\n", "| name | |", "|---|---|", *rows, ""]
    )


def public_names(module: types.ModuleType) -> list[str]:
    """Returns the functions and classes of jaxbucket that a package shows."""
    names = getattr(module, "__all__", dir(module))
    return [
        name
        for name in sorted(name for name in names if not name.startswith("_"))
        if str(getattr(getattr(module, name), "__module__", "")).startswith("jaxbucket")
    ]


def first_sentence(thing: object) -> str:
    """Returns the first sentence of a docstring, on one line."""
    paragraph = (inspect.getdoc(thing) or "").partition("\n\n")[0]
    line = " ".join(paragraph.split()).replace("|", "\\|")
    return re.split(r"(?<=[a-z`)]\.) (?=[A-Z`])", line)[0]


if __name__ == "__main__":
    main()
