"""Runs the notebook, if `jaxbucket[docs]` is installed."""

import pathlib

import pytest

NOTEBOOK = pathlib.Path(__file__).parents[1] / "examples" / "explore_plan.ipynb"


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "Clear them."
    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    pictures = sum("image/png" in str(cell.get("outputs")) for cell in notebook.cells)
    assert pictures == 2
