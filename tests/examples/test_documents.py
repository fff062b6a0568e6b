"""Tests of the documents of the examples: read, deduplicated and split."""

import importlib
import pathlib
import re

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def test_lines_of_text_and_folders_of_files_are_documents(documents, tmp_path):
    text = tmp_path / "lines.txt"
    text.write_text("\n".join(f"line {n}" for n in range(150)))
    folder = tmp_path / "folder"
    folder.mkdir()
    for n in range(100):
        (folder / f"{n}.md").write_text(f"# File {n}\n")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff")
    for data, count in ((text, 150), (folder, 100)):
        splits = documents.load(str(data))
        assert len(splits.train) + len(splits.held_out) == count


def test_a_moved_file_has_the_same_split(documents, jsonl, tmp_path):
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(jsonl.read_bytes())
    first, second = (documents.load(str(path), "body") for path in (jsonl, moved))
    assert first.train.fingerprint == second.train.fingerprint
    assert len(first.held_out) == len(second.held_out) > 0


def test_the_fingerprint_changes_with_a_single_bit(documents, jsonl):
    (examples, *_) = documents.load(str(jsonl), "body")
    before = examples.fingerprint
    for index in (0, 77, len(examples) - 1):
        changed = documents.Examples(dict(example) for example in examples)
        tokens = changed[index]["tokens"].copy()
        tokens[-1] ^= 1
        changed[index]["tokens"] = tokens
        assert changed.fingerprint != before


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("documents")


def write(path: pathlib.Path, content: bytes) -> pathlib.Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "has no text. Pass a file"),
        ("blank.txt", b"\n \n", "has no text. Pass a file"),
        ("one.txt", b"a line\n", "has 1 distinct documents, too few to hold some out"),
        ("broken.jsonl", b'{"text": "a"}\n{"te', "broken.jsonl:2 is not JSON"),
        (
            "other.jsonl",
            b'{"body": "a"}',
            "has no string field 'text'; its fields are ['body']. Pass `field=`",
        ),
        ("number.jsonl", b'{"text": 3}', "has no string field 'text'"),
        ("list.jsonl", b"[1]", "list.jsonl:1 is not a JSON object"),
        ("latin.txt", b"caf\xe9\n", "is not UTF-8 text"),
        ("table.csv", b"a,b\n", "is not a folder, a .jsonl file or a .txt file"),
    ],
)
def test_unreadable_data_is_refused(documents, tmp_path, name, content, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        documents.load(str(write(tmp_path / name, content)))


@pytest.mark.parametrize("max_len", [0, -3])
def test_documents_are_not_truncated_from_their_end(documents, max_len):
    with pytest.raises(ValueError, match=f"`--max-len {max_len}` is not positive"):
        documents.load(max_len=max_len)


@pytest.mark.exhaustive
def test_no_file_is_in_both_splits(documents):
    def texts(examples):
        return {example["tokens"].tobytes().decode() for example in examples}

    splits = documents.load()
    train, held_out = texts(splits.train), texts(splits.held_out)
    assert len(train) == len(splits.train) > 1000
    assert len(held_out) == len(splits.held_out) > 20
    assert not train & held_out
    assert all(x.startswith(("def ", "class ", "async ", "@")) for x in train)
    sides = {}
    for document in documents.standard_library():
        # Of equal texts in several files only the first is a document.
        if document.text not in sides:
            sides[document.text] = document.origin
    assert not {sides[x] for x in train} & {sides[x] for x in held_out}
