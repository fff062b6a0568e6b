"""Lower bounds of `pyproject.toml` are tested; a source distribution tests itself."""

import pathlib
import re
import tomllib

import jaxbucket
from jaxbucket.attention import tokamax

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_source_distribution_has_what_the_tests_read():
    targets = PROJECT["tool"]["hatch"]["build"]["targets"]
    packed = {name.strip("/") for name in targets["sdist"]["include"]}
    packed |= {"LICENSE", "README.md", "pyproject.toml"}
    code = "".join(path.read_text() for path in ROOT.glob("tests/**/*.py"))
    read = set(re.findall(r'(?:ROOT|parents\[\d\])(?:\.parent)? / "([^"]+)"', code))
    assert {".ci", "docs", "examples", "scripts"} <= read <= packed | {"shared"}
    assert {"CHANGELOG.md", "conftest.py", "tests"} <= packed
    assert all((ROOT / name).exists() for name in packed)


def test_the_workflow_tests_every_python_that_the_wheel_names():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    names = "".join(PROJECT["project"]["classifiers"])
    versions = re.findall(r"Python :: (3\.\d+)", names)
    assert re.findall(r'"(3\.\d+)"', text) == versions
    assert "run: .ci/run" in text


def test_the_citation_has_the_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {jaxbucket.__version__}\n" in text


def test_every_lower_bound_is_tested():
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    tested = [extras[name] for name in ("train", "files", "plots", "test", "loaders")]
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


def test_the_kernel_for_gpus_is_taken_from_the_version_that_the_extras_install():
    extras = PROJECT["project"]["optional-dependencies"]
    for name in ("gpu", "gpu-plan"):
        (pin,) = [x for x in extras[name] if x.startswith("tokamax")]
        assert pin.startswith(f"tokamax=={tokamax._VERSION};")
