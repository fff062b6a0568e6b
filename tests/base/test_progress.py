"""Progress bars are shown only on a terminal."""

import io
import sys

import pytest

from jaxbucket.base.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "shown"),
    [(Terminal(), True), (Terminal(), False), (io.StringIO(), True)],
)
def test_a_bar_is_shown_on_a_terminal_if_wanted(monkeypatch, stream, shown):
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar(shown) as bar:
        bar.add_task("Waiting", total=None)
        bar.refresh()
    assert ("Waiting" in stream.getvalue()) == (shown and stream.isatty())
