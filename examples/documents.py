"""Documents to train on: the running Python's standard library, or the user's own.

A document comes with the name of what it is from, by which it is either trained on or
held out: the same on every machine, and never both halves of one file.
"""

import ast
import functools
import hashlib
import json
import pathlib
import sysconfig
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

HELD_OUT_IN_THOUSAND = 60


class Document(NamedTuple):
    """Some text, and the file (or line of a file) it is from."""

    origin: str
    text: str


class Examples(list[dict[str, np.ndarray]]):
    """For each document `{"tokens": [n] uint8}`, its bytes."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names every byte of them: not one may change while a run goes on."""
        state = hashlib.blake2b(digest_size=16)
        for example in self:
            state.update(len(example["tokens"]).to_bytes(8, "little"))
            state.update(example["tokens"].data)
        return state.hexdigest()

    def cut(self, length: int) -> "Examples":
        """All of them, at most so long."""
        return Examples({"tokens": x["tokens"][:length]} for x in self)


class Split(NamedTuple):
    """What is trained on, and what is held out."""

    train: Examples
    held_out: Examples


def load(path: str | None = None, field: str = "text") -> Split:
    """Returns the documents of `path`, or of the standard library, as bytes.

    Args:
      path: a `.jsonl` file, a `.txt` file with a document in every line, or a folder
        whose files are documents.
      field: where a line of `.jsonl` has its text.

    Raises:
      ValueError: if there is nothing to read, or not enough to hold something out.
    """
    documents = standard_library() if path is None else _own(pathlib.Path(path), field)
    where = "the standard library" if path is None else f"`--data {path}`"
    split = _split(_distinct(documents))
    if not split.train and not split.held_out:
        raise ValueError(f"{where} has no text. Give a file or folder with documents.")
    if not split.train or not split.held_out:
        raise ValueError(
            f"{where} has {len(split.train) + len(split.held_out)} distinct documents, "
            "too few to hold some out. Give some hundreds."
        )
    return split


def train() -> Examples:
    """The standard library's, for `jaxbucket measure documents:train`."""
    return load().train


def standard_library() -> Iterator[Document]:
    """Yields every top-level function and class of the running Python's library."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    # Python is often installed without its tests; what is left is alike everywhere.
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if skipped.isdisjoint(name.parts):
            for text in _definitions(file):
                yield Document(name.as_posix(), text)


def _definitions(file: pathlib.Path) -> Iterator[str]:
    try:
        source = file.read_text("utf-8")
        module = ast.parse(source)
    except (OSError, SyntaxError, UnicodeDecodeError):
        return  # Python ships files that are broken on purpose.
    lines = source.split("\n")
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min(part.lineno for part in (node, *node.decorator_list))
            yield "\n".join(lines[first - 1 : node.end_lineno])


def _own(path: pathlib.Path, field: str) -> Iterator[Document]:
    readers = {".jsonl": _json_lines, ".txt": _text_lines}
    if not path.exists():
        raise ValueError(f"`--data {path}` does not exist. Check the path.")
    if not path.is_dir() and path.suffix not in readers:
        raise ValueError(
            f"`--data {path}` is no folder, .jsonl or .txt file. Give one of these."
        )
    try:
        if path.is_dir():
            yield from _files(path)
        else:
            for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):
                if line.strip():
                    where = f"{path}:{number}"
                    text = readers[path.suffix](line, where, field)
                    # Not the path: a file that is moved is split as it was.
                    yield Document(str(number), text)
    except OSError as error:
        raise ValueError(f"`--data {path}` cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"`--data {path}` is not UTF-8 text ({error.reason} at byte "
            f"{error.start}). Convert it first."
        ) from None


def _json_lines(line: str, where: str, field: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}.") from None
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        names = sorted(record) if isinstance(record, dict) else "no fields"
        raise ValueError(
            f"{where} has no text in {field!r}, but {names}. Name it with `--field`."
        )
    return record[field]


def _text_lines(line: str, where: str, field: str) -> str:
    del where, field
    return line


def _files(folder: pathlib.Path) -> Iterator[Document]:
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not is_hidden(file.relative_to(folder)):
            try:
                text = file.read_text("utf-8")
            except UnicodeDecodeError:
                continue  # A folder may hold pictures and the like beside its texts.
            yield Document(file.relative_to(folder).as_posix(), text)


def is_hidden(path: pathlib.Path) -> bool:
    """Whether a file of this path in a folder is no document."""
    return any(part.startswith(".") for part in path.parts)


def _distinct(documents: Iterable[Document]) -> Iterator[Document]:
    seen = set()
    for document in documents:
        if document.text.strip() and document.text not in seen:
            seen.add(document.text)
            yield document


def _split(documents: Iterable[Document]) -> Split:
    split = Split(Examples(), Examples())
    for document in documents:
        hashed = hashlib.blake2b(document.origin.encode(), digest_size=4).digest()
        held_out = int.from_bytes(hashed, "little") % 1000 < HELD_OUT_IN_THOUSAND
        tokens = np.frombuffer(document.text.encode("utf-8", "replace"), np.uint8)
        (split.held_out if held_out else split.train).append({"tokens": tokens})
    return split
