"""The lower bounds of `pyproject.toml` are the versions that `.ci/run` tests."""

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[1]


def test_every_lower_bound_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tested = [extras[name] for name in ("train", "parquet", "plots", "test", "loaders")]
    requirements = [x for names in (project["dependencies"], *tested) for x in names]
    # "etils[epath,epy]>=1.12" -> ("etils", "1.12")
    bounds = dict(
        match.groups()
        for x in requirements
        if (match := re.fullmatch(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", x))
    )
    text = (ROOT / ".ci" / "oldest.txt").read_text()
    oldest = dict(re.findall(r"^([\w-]+)==([\d.]+)$", text, re.MULTILINE))
    assert len(bounds) > 15
    for name, bound in bounds.items():
        assert [*map(int, oldest[name].split("."))][: bound.count(".") + 1] == [
            *map(int, bound.split("."))
        ]
        # Every further component is 0, so no older version satisfies the bound.
        assert not any(map(int, oldest[name].split(".")[bound.count(".") + 1 :]))
