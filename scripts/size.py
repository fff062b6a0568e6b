"""Counts the lines of the library, its tests and its documentation.

    python scripts/size.py [--loop] [--json]

Code is what is left without docstrings, comments and blank lines. Checks are `raise`
statements with their `if`, and functions whose name starts with "check", but not in
`jaxbucket.testing`, whose tools check what users write; their share is that of all
code. The documentation is counted without its reference. `--loop` also runs the
README's loop, and counts the files whose functions it calls.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import json
import pathlib
import re
import sys
import threading
import tokenize
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
LIBRARY = ROOT / "jaxbucket"
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
DOCUMENTED = ast.Module, ast.ClassDef, *FUNCTIONS
_LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT),
    *(tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER),
}


def num_lines(paths: Iterator[pathlib.Path] | list[pathlib.Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def span(node: Any) -> set[int]:
    return set(range(node.lineno, node.end_lineno + 1))


def code_lines(text: str) -> set[int]:
    """Returns the numbers of the lines that have code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            lines -= span(node.body[0])
    return lines


def check_lines(text: str) -> set[int]:
    """Returns the numbers of the lines of checks and their texts."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTIONS) and node.name.lstrip("_").startswith("check"):
            lines |= span(node)
        elif isinstance(node, ast.Raise):
            lines |= span(node)
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            lines |= span(node.test)
    return lines


def assigned_libraries(text: str) -> list[str]:
    """Returns the attributes of what other libraries export that are assigned."""
    tree = ast.parse(text)
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and not (getattr(node, "module", None) or "").startswith("jaxbucket")
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            base: ast.expr = target
            while isinstance(base, ast.Attribute):
                base = base.value
            if base is not target and isinstance(base, ast.Name):
                if base.id in imported:
                    found.append(ast.unparse(target))
    return found


def readme_loop() -> dict[str, int]:
    """Runs the README's loop; returns the files of functions that it calls."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S
    )
    files: set[str] = set()

    def notice(frame: Any, event: str, arg: Any) -> None:
        # The bodies of modules and classes are calls as well, without fast locals.
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            files.add(frame.f_code.co_filename)

    block = next(x for x in blocks if "compile_steps" in x)
    with contextlib.redirect_stdout(io.StringIO()):
        threading.setprofile(notice)
        sys.setprofile(notice)
        try:
            exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    paths = [path for path in LIBRARY.rglob("*.py") if str(path) in files]
    return {"files": len(paths), "lines": num_lines(paths)}


def measure(*, loop: bool) -> dict[str, Any]:
    files = sorted(LIBRARY.rglob("*.py"))
    texts = [path.read_text() for path in files]
    code = [code_lines(text) for text in texts]
    checks = [
        check_lines(text) & lines
        for path, text, lines in zip(files, texts, code, strict=True)
        if path.parent != LIBRARY / "testing"
    ]
    num_code, num_checks = sum(map(len, code)), sum(map(len, checks))
    docs = [x for x in (ROOT / "docs").rglob("*.md") if x.parent.name != "reference"]
    packages: dict[str, list[int]] = {}
    for path, lines in zip(files, code, strict=True):
        counts = packages.setdefault(path.relative_to(LIBRARY).parts[0], [0, 0, 0])
        counts[0] += 1
        counts[1] += num_lines([path])
        counts[2] += len(lines)
    result = {
        "library": {
            "files": len(files),
            "lines": num_lines(files),
            "code": num_code,
            "checks": num_checks,
            "checks_share": round(num_checks / num_code, 3),
            "files_with_jax_src": sum("jax._src" in text for text in texts),
            "assigned": [name for text in texts for name in assigned_libraries(text)],
        },
        "packages": packages,
        "tests": num_lines(list((ROOT / "tests").rglob("*.py"))),
        "docs": num_lines(docs),
    }
    return {**result, "readme_loop": readme_loop()} if loop else result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loop", action="store_true", help="run the README's loop")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    result = measure(loop=args.loop)
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for name, (files, lines, code) in sorted(result.pop("packages").items()):
        print(f"{name:16} {files:4} files {lines:7,} lines {code:7,} of code")
    for name, value in result.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
