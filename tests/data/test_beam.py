"""Lengths measured by Apache Beam's local runner."""

import importlib.util
import pathlib
import sys

import numpy as np
import pytest

import jaxbucket as jb

pytest.importorskip("apache_beam")
ROOT = pathlib.Path(__file__).parents[2]
SOURCE = """
import pathlib

class Source(list):
    def __getitem__(self, index):
        with pathlib.Path(r"{log}").open("a") as file:
            file.write(f"{{index}}\\n")
        return super().__getitem__(index)

def open_source():
    return Source({{"tokens": [7] * (index % 50 + 1)}} for index in range({size}))
"""


@pytest.mark.parametrize("size, parts", [(1000, 7), (100, 5)])
def test_a_pipeline_stores_what_measure_lengths_reads(
    tmp_path, monkeypatch, size, parts
):
    log, cache = tmp_path / "log.txt", tmp_path / "cache"
    name = f"source_of_{size}"
    (tmp_path / f"{name}.py").write_text(SOURCE.format(log=log, size=size))
    monkeypatch.syspath_prepend(tmp_path)
    path = ROOT / "examples" / "measure_with_beam.py"
    spec = importlib.util.spec_from_file_location("measure_with_beam", path)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "measure_with_beam", script)
    spec.loader.exec_module(script)
    arguments = [f"{name}:open_source", str(cache), f"--parts={parts}"]
    lengths = script.main(arguments)
    np.testing.assert_array_equal(lengths, np.arange(size) % 50 + 1)
    measured = [int(line) for line in log.read_text().split()]
    assert set(measured) == set(range(size))
    # A job reads the examples that identify the source, and measures none.
    log.write_text("")
    source = importlib.import_module(name).open_source()
    again = jb.measure_lengths(source, cache=cache, progress=False)
    np.testing.assert_array_equal(again, lengths)
    assert len(log.read_text().split()) < 50
