"""The command `jaxbucket analyze`."""

import importlib
import json
import os
import pathlib
import shutil
import sys

import matplotlib.image
import numpy as np
import pytest
from click.testing import CliRunner

import jaxbucket as jb
from jaxbucket.cli import main
from jaxbucket.cli.metric_report import MetricSummary, _formatted

MODULE = """
import os
import numpy as np
import jaxbucket as jb

def train():
    rng = np.random.default_rng(0)
    return [{"tokens": rng.integers(0, 9, n)} for n in rng.integers(1, 40, 300)]

def texts():
    return [[1, 2, 3], [4]]

def total(example):
    return 2**40 + int(example["tokens"].sum())

def negative(example):
    return -total(example) / 2**40

commonest = jb.data.AccumulatedMetric(
    lambda x: np.bincount(x["tokens"], minlength=9),
    lambda x, counts: counts[x["tokens"]].max(),
    9,
)

def nan(example):
    return float("nan")

def die(example):
    os._exit(1)

def leave(example):
    raise SystemExit(3)

def failing():
    raise OSError("no data")

def number():
    return 3

def mapping():
    return {"a": 1}
"""
SOURCE = "analyzed:train"
TOTAL = "total=analyzed:total"


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A current folder with a module of functions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "analyzed", raising=False)
    # Bytecode would hide an edit within a second that keeps the size of the file.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "analyzed.py").write_text(MODULE)
    return tmp_path


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["analyze", *map(str, args)])
    assert result.exit_code == code, result.output
    return result.output


def source() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"tokens": rng.integers(0, 9, n)} for n in rng.integers(1, 40, 300)]


def test_an_index_is_written_for_each_metric(folder):
    metrics = ("rarity=tokens", "mean_rarity", TOTAL)
    words = [word for metric in metrics for word in ("--metric", metric)]
    options = ("--vocab-size", 9, "--dtype", "int64", "-o", "out", "--plot", "x.png")
    numbers = json.loads(run(SOURCE, *words, *options, "--json"))
    want = {"total": np.array([2**40 + x["tokens"].sum() for x in source()])}
    for name, mean in (("rarity", False), ("mean_rarity", True)):
        metric = jb.data.token_rarity(vocab_size=9, mean=mean)
        want[name] = jb.data.measure_difficulty(source(), metric, progress=False)
    assert set(numbers) == set(want) == {x.name for x in (folder / "out").iterdir()}
    for name, values in want.items():
        index = jb.schedule.DifficultyIndex(folder / "out" / name)
        index.check()
        assert index.difficulty.dtype == values.dtype
        np.testing.assert_array_equal(index.difficulty, values)
        ordered = np.sort(values)
        shown = numbers[name]
        assert shown["index"] == str(pathlib.Path("out") / name)
        assert (shown["examples"], shown["dtype"]) == (300, str(values.dtype))
        percentiles = ("min", "p10", "median", "p90", "p99", "max")
        assert [shown[x] for x in percentiles] == [
            ordered[i].item() for i in (0, 29, 149, 269, 296, 299)
        ]
        assert shown["mean"] == pytest.approx(values.mean(dtype=float))
    assert matplotlib.image.imread(folder / "x.png").shape[0] > 1000


def test_the_table_has_a_row_for_each_metric(folder):
    metrics = ("least=analyzed:negative", "most=analyzed:commonest")
    words = [word for metric in metrics for word in ("--metric", metric)]
    table = run(SOURCE, *words, "-o", "out")
    header, _, least, commonest = table.strip().splitlines()
    assert header.split() == "metric min p10 median p90 p99 max mean".split()
    values = [float(x.replace(",", "")) for x in least.split()[1:]]
    assert values == sorted(values[:-1]) + values[-1:] and max(values) < 0
    counts = sum(np.bincount(x["tokens"], minlength=9) for x in source())
    assert commonest.split()[-2] == f"{counts.max():,}"


def test_lengths_are_those_of_measure(folder):
    for number, name in enumerate(("texts", "train")):
        metric = ("--metric", "length", "-o", name, "--json")
        shown = json.loads(run(f"analyzed:{name}", *metric))["length"]
        want = jb.measure_lengths(source()) if number else np.array([3, 1])
        assert shown["dtype"] == "int32"
        index = jb.schedule.DifficultyIndex(name + "/length")
        np.testing.assert_array_equal(index.difficulty, want)


def test_numbers_are_formatted():
    shown = [_formatted(x) for x in (12, 12345, 0.12345678, 12345.6, -1e20, 0.0)]
    assert shown == ["12", "12,345", "0.1235", "12,346", "-1e+20", "0"]


def test_an_index_of_one_example_has_percentiles(tmp_path):
    index = jb.sort.write_difficulty_index(tmp_path / "x", [0.5], jb.data_mesh())
    summary = MetricSummary.of(index)
    assert summary.min == summary.p10 == summary.max == summary.mean == 0.5


def test_a_failed_run_continues_unless_its_module_is_edited(folder, monkeypatch):
    metrics = ("--metric", "length", "--metric", TOTAL, "-o", "out")
    other = folder / "out" / "total"
    jb.sort.write_difficulty_index(other, [0.5], jb.data_mesh())
    for number, count in ((40, 2), (40, 2), (41, 3)):
        (folder / "analyzed.py").write_text(MODULE.replace("2**40", f"2**{number}"))
        monkeypatch.delitem(sys.modules, "analyzed", raising=False)
        importlib.invalidate_caches()
        assert "an index of different difficulties" in run(SOURCE, *metrics, code=1)
        assert len(list((folder / "out" / ".measured").iterdir())) == count
    shutil.rmtree(other)
    run(SOURCE, *metrics)
    assert sorted(os.listdir("out")) == ["length", "total"]
    # The same metrics are measured again, and the indexes found.
    run(SOURCE, *metrics)
    index = jb.schedule.DifficultyIndex("out/total")
    assert index.difficulty.min() >= 2**41


def test_a_folder_of_other_files_is_refused_before_measuring(folder):
    (folder / "out" / "total").mkdir(parents=True)
    (folder / "out" / "total" / "file").touch()
    output = run(SOURCE, "--metric", "length", "--metric", TOTAL, "-o", "out", code=1)
    assert "Error: `--output out`: out/total exists but is not an index. De" in output
    assert os.listdir("out") == ["total"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "die",
            "A worker process died, possibly for lack of memory. Run the comm",
        ),
        ("leave", "The source or the function exited a worker: SystemExit(3)."),
    ],
)
def test_the_end_of_a_worker_is_reported_in_one_line(folder, function, message):
    metric = ("--metric", f"total=analyzed:{function}")
    output = run(SOURCE, *metric, "-o", "out", "--num-workers", 1, code=1)
    assert output.startswith(f"Error: {message}") and output.count("\n") == 1


def test_measure_reports_a_dead_worker_in_one_line(folder):
    words = ["measure", SOURCE, "--length-fn", "analyzed:die", "--num-workers", "1"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    message = (
        "Error: `analyzed:train`: a worker process died, possibly for lack of memor"
    )
    assert result.output.startswith(message) and "`--num-workers`" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metric", "a/b=x:y"], "`--metric a/b=x:y`: the name 'a/b' cannot be that "),
        (
            ["--metric", ".a=x:y"],
            "`--metric .a=x:y`: the name '.a' cannot be that of a",
        ),
        (["--metric", TOTAL] * 2, "another metric is named 'total'. Choose a differen"),
        (["--metric", "words"], "`--metric words`: choose length, rarity or mean_rari"),
        (["--metric", "a=b"], "`--metric a=b`: choose length, rarity or mean_rarity, "),
        (
            ["--metric", "rarity"],
            "`--metric rarity` requires `--vocab-size`. Pass both",
        ),
        (
            ["--metric", "length", "--vocab-size", "5"],
            "`--vocab-size 5` has no effect without `--metric rarity` or `mean_rar",
        ),
        (["--metric", "a=analyzed:b"], "`analyzed:b`: analyzed has no 'b'. Choose one"),
        (
            ["--metric", "length=words"],
            "`source[0]`, metric 'length': `--metric length=words`: ['words'] are not ",
        ),
        (["--metric", "late=analyzed:nan"], "the example, or fix `--metric late`."),
        (["--metric", TOTAL, "--plot", "x.bmp"], "`--plot x.bmp` has an unknown suffi"),
        (["--metric", TOTAL, "--plot", "a/x.png"], "the folder a does not exist."),
    ],
)
def test_invalid_metrics_are_refused(folder, arguments, message):
    output = run(SOURCE, *arguments, "-o", "out", code=1)
    assert output.startswith("Error: ") and message in output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("analyzed", "`analyzed` must be `module:function`, such as"),
        ("analyzed:failing", "`analyzed:failing` raised OSError: no data. Fix the fu"),
        ("analyzed:number", "`analyzed:number` returned 3. Return a random-access so"),
        ("analyzed:mapping", "returned {'a': 1}. Return a random-access source"),
        ("analyzed:texts", "[1, 2, 3] is not a dict. Use `--metric length` without a"),
    ],
)
def test_invalid_sources_are_refused(folder, name, message):
    output = run(name, "--metric", "length=tokens", "-o", "out", code=1)
    assert output.startswith("Error: ") and message in output


def test_options_are_required(folder):
    assert "Missing option '--metric'" in run(SOURCE, "-o", "out", code=2)
    assert "Missing option '--output'" in run(SOURCE, "--metric", "a", code=2)


@pytest.mark.exhaustive
def test_processes_write_the_same_indexes_together(folder, launch):
    words = ["--metric", "length", "--metric", "rarity", "--vocab-size", "9"]
    run(SOURCE, *words, "-o", "one")
    more = ["-o", "two", "--plot", "x.png", "--num-workers", "1", "--json"]
    call = ["analyze", SOURCE, *words, *more]
    code = f"from jaxbucket.cli import main\nif __name__ == '__main__':\n main({call})"
    done = launch(code)
    assert done.status == 0, done.output
    assert not any("{" in line for line in done.lines(1))
    numbers = json.loads("\n".join(x for x in done.lines(0) if x[:1] in " {}"))
    assert numbers["rarity"]["examples"] == 300
    assert (folder / "x.png").exists()
    for name in ("length", "rarity"):
        for file in ("difficulty.npy", "examples.npy", "index.json"):
            paths = [folder / x / name / file for x in ("one", "two")]
            assert paths[0].read_bytes() == paths[1].read_bytes()
    assert sorted(os.listdir("two")) == ["length", "rarity"]
