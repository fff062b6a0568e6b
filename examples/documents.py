"""Documents to train on: Python's standard library, or the user's own texts.

Every document has an origin, the file or line that it comes from. A hash of the origin
decides whether the document is trained on or held out. The split is therefore the same
on every machine, and all definitions in one file of the standard library stay together.
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

HELD_OUT_PER_THOUSAND = 60


class Document(NamedTuple):
    """A text, and the file or line that it comes from."""

    origin: str
    text: str


class Examples(list[dict[str, np.ndarray]]):
    """A source with one example per document: `{"tokens": [n] uint8}`, its bytes."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of every byte, which a resumed run compares with its checkpoint."""
        state = hashlib.blake2b(digest_size=16)
        for example in self:
            state.update(len(example["tokens"]).to_bytes(8, "little"))
            state.update(example["tokens"].data)
        return state.hexdigest()


class Splits(NamedTuple):
    """The training documents and the held-out documents."""

    train: Examples
    held_out: Examples


def load(
    path: str | None = None, field: str = "text", max_len: int | None = None
) -> Splits:
    """Returns the training and held-out documents, as bytes.

    Args:
      path: a `.jsonl` file, a `.txt` file with one document per line, or a folder whose
        files are documents. None for the standard library.
      field: the field of a `.jsonl` line that has its text.
      max_len: the number of bytes to truncate documents to. None keeps all bytes.

    Raises:
      ValueError: if the path cannot be read, or has too few documents to hold some out,
        or `max_len` is not positive.
    """
    if max_len is not None and max_len < 1:
        raise ValueError(f"`--max-len {max_len}` is not positive. Pass 1 or more.")
    documents = standard_library() if path is None else read(pathlib.Path(path), field)
    name = "The standard library" if path is None else f"`--data {path}`"
    splits = Splits(Examples(), Examples())
    for document in deduplicate(documents):
        hashed = hashlib.blake2b(document.origin.encode(), digest_size=4).digest()
        is_held_out = int.from_bytes(hashed, "little") % 1000 < HELD_OUT_PER_THOUSAND
        content = document.text.encode("utf-8", "replace")[:max_len]
        examples = splits.held_out if is_held_out else splits.train
        examples.append({"tokens": np.frombuffer(content, np.uint8)})
    num_documents = len(splits.train) + len(splits.held_out)
    if not num_documents:
        raise ValueError(f"{name} has no text. Pass a file or folder with documents.")
    if not splits.train or not splits.held_out:
        raise ValueError(
            f"{name} has {num_documents} distinct documents, too few to hold some out. "
            "Provide at least a few hundred documents. Each file of a folder is one."
        )
    return splits


def train() -> Examples:
    """Returns the training split, for `jaxbucket measure documents:train`."""
    return load().train


def standard_library() -> Iterator[Document]:
    """Yields every top-level function and class of Python's standard library.

    It is the library of the running interpreter.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    # Python's tests are not installed everywhere.
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if skipped.isdisjoint(name.parts):
            for text in definitions(file):
                yield Document(name.as_posix(), text)


def definitions(file: pathlib.Path) -> Iterator[str]:
    """Yields the source of every top-level function and class."""
    try:
        source = file.read_text("utf-8")
        module = ast.parse(source)
    except (OSError, SyntaxError, UnicodeDecodeError):
        return  # Python ships some files that are broken on purpose.
    lines = source.split("\n")
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min(part.lineno for part in (node, *node.decorator_list))
            yield "\n".join(lines[first - 1 : node.end_lineno])


def read(path: pathlib.Path, field: str) -> Iterator[Document]:
    """Yields the documents of a file or folder."""
    if not path.exists():
        raise ValueError(f"`--data {path}` does not exist. Check the path.")
    if not path.is_dir() and path.suffix not in (".jsonl", ".txt"):
        raise ValueError(
            f"`--data {path}` is not a folder, a .jsonl file or a .txt file. Pass "
            "one of these."
        )
    try:
        if path.is_dir():
            yield from read_folder(path)
            return
        for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):
            if line.strip():
                is_json = path.suffix == ".jsonl"
                text = text_of(line, f"{path}:{number}", field) if is_json else line
                # The origin does not contain the path, so that moving the file does not
                # change the split.
                yield Document(str(number), text)
    except OSError as error:
        raise ValueError(f"`--data {path}` cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"`--data {path}` is not UTF-8 text ({error.reason} at byte "
            f"{error.start}). Convert it first."
        ) from None


def read_folder(folder: pathlib.Path) -> Iterator[Document]:
    """Yields every text file of a folder and its subfolders, without hidden ones."""
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if file.is_file() and not is_hidden(name):
            try:
                text = file.read_text("utf-8")
            except UnicodeDecodeError:
                continue  # The folder may also contain images and other binary files.
            yield Document(name.as_posix(), text)


def is_hidden(name: pathlib.Path) -> bool:
    """Returns whether the file or one of its parent folders is hidden."""
    return any(part.startswith(".") for part in name.parts)


def text_of(line: str, place: str, field: str) -> str:
    """Returns the text of a line of JSON."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error}.") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place} is not a JSON object with named fields.")
    if not isinstance(record.get(field), str):
        raise ValueError(
            f"{place} has no string field {field!r}; its fields are {sorted(record)}. "
            "Pass `field=`, or `--field` to train_lm.py."
        )
    return record[field]


def deduplicate(documents: Iterable[Document]) -> Iterator[Document]:
    """Yields the non-blank documents, without duplicates."""
    seen = set()
    for document in documents:
        if document.text.strip() and document.text not in seen:
            seen.add(document.text)
            yield document
