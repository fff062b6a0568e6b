"""Files and folders appear only once they are complete."""

import pytest

from jaxbucket.base import files


def test_a_block_that_fails_changes_nothing(tmp_path):
    path = tmp_path / "kept.txt"
    path.write_text("before")
    for name in ("kept.txt", "new.txt", "folder"):
        with pytest.raises(KeyError), files.complete(tmp_path / name) as draft:
            if name == "folder":
                draft.mkdir()
                draft = draft / "part"
            draft.write_text("half")
            raise KeyError
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "before"


def test_a_complete_draft_replaces_a_file_or_an_empty_folder(tmp_path):
    (tmp_path / "file").write_text("before")
    (tmp_path / "folder").mkdir()
    with files.complete(tmp_path / "file") as draft:
        draft.write_text("after")
        assert (tmp_path / "file").read_text() == "before"
    with files.complete(tmp_path / "folder") as draft:
        draft.mkdir()
        (draft / "part").write_text("whole")
    with pytest.raises(OSError), files.complete(tmp_path / "folder") as draft:
        draft.mkdir()
    with files.complete(tmp_path / "deep" / "file") as draft:
        draft.touch()
    assert (tmp_path / "file").read_text() == "after"
    assert (tmp_path / "folder" / "part").read_text() == "whole"
    assert sorted(x.name for x in tmp_path.iterdir()) == ["deep", "file", "folder"]


def test_drafts_of_killed_processes_are_found(tmp_path):
    path = tmp_path / "[x]"
    for draft in (files.new_draft(path), files.new_draft(tmp_path / "y")):
        draft.touch()
    (tmp_path / "[x].mine.partial").touch()
    (found,) = files.drafts(path)
    files.delete(found)
    assert not files.drafts(path) and len(list(tmp_path.iterdir())) == 2
