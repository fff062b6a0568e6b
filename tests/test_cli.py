"""The command, as a user types it."""

import json
import pathlib
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from click.testing import CliRunner

from jaxbucket import BucketPlan, plan_buckets, report
from jaxbucket.cli import main

LENGTHS = np.random.default_rng(0).integers(1, 500, 1000).astype(np.int32)


@pytest.fixture
def files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The current folder, with the same lengths in files of every kind."""
    monkeypatch.chdir(tmp_path)
    np.save("lengths.npy", LENGTHS)
    np.savez("one.npz", lengths=LENGTHS)
    np.savez("two.npz", lengths=LENGTHS, others=LENGTHS[:10])
    pathlib.Path("lengths.txt").write_text("\n".join(map(str, LENGTHS)) + "\n")
    return tmp_path


def run(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result.output


def refused(*args: object) -> str:
    """The one line that says why, with an exit status that is not 0."""
    output = run(*args, code=1)
    assert output.startswith("Error: ")
    assert output.count("\n") == 1
    return output


PLAN = plan_buckets(LENGTHS, max_tokens=4096, num_buckets=4, seq_len_multiple=32)
OPTIONS = ("--max-tokens", 4096, "--num-buckets", 4, "--seq-len-multiple", 32)


@pytest.mark.parametrize(
    "arguments",
    [
        ["lengths.npy"],
        ["one.npz"],
        ["two.npz", "--column", "lengths"],
        ["lengths.txt"],
    ],
)
def test_a_plan_is_made_of_lengths_of_every_kind(files, arguments):
    run("plan", *arguments, *OPTIONS, "-o", "plan.json")
    assert BucketPlan.from_json((files / "plan.json").read_text()) == PLAN


def test_every_number_of_the_table_is_in_the_json(files):
    table = run("plan", "lengths.npy", *OPTIONS)
    found = json.loads(run("plan", "lengths.npy", *OPTIONS, "--json"))
    epoch = report(PLAN, LENGTHS)
    assert found["report"] == json.loads(epoch.to_json())
    assert BucketPlan.from_json(json.dumps(found["plan"])) == PLAN
    assert found["fingerprint"] == PLAN.fingerprint
    assert f"{epoch.steps_per_epoch} steps per epoch" in table
    for bucket in PLAN.buckets:
        assert str(bucket.batch_size) in table and str(bucket.seq_len) in table


def test_every_option_reaches_the_planner(files):
    options = {
        "max_tokens": 2048,
        "num_buckets": 3,
        "batch_size_multiple": 4,
        "seq_len_multiple": 16,
        "max_seq_len": 256,
        "boundaries": "geometric",
        "overlong": "truncate",
    }
    words = [
        word
        for name, value in options.items()
        for word in ("--" + name.replace("_", "-"), value)
    ]
    run("plan", "lengths.npy", *words, "-o", "plan.json")
    made = BucketPlan.from_json((files / "plan.json").read_text())
    assert made == plan_buckets(LENGTHS, **options)
    run(
        *("plan", "lengths.npy", "--max-tokens", 1024),
        *("--boundaries", "128,512", "-o", "plan.json"),
    )
    made = BucketPlan.from_json((files / "plan.json").read_text())
    assert made.boundaries.tolist() == [128, 512]


def test_a_plan_is_reported_on_other_lengths(files):
    run("plan", "lengths.npy", *OPTIONS, "-o", "plan.json")
    others = run("report", "plan.json", "two.npz", "--column", "others", "--json")
    epoch = report(PLAN, LENGTHS[:10])
    assert json.loads(others)["report"] == json.loads(epoch.to_json())


def test_a_report_knows_remainders_and_micro_batches(files):
    run("plan", "lengths.npy", *OPTIONS, "-o", "plan.json")
    options = {"remainder": "drop", "accumulate": 2, "group": "mixed"}
    words = [word for name in options for word in (f"--{name}", str(options[name]))]
    found = run("report", "plan.json", "lengths.npy", *words, "--json")
    epoch = report(PLAN, LENGTHS, **options)
    assert epoch != report(PLAN, LENGTHS)
    assert json.loads(found)["report"] == json.loads(epoch.to_json())


def test_pictures_are_drawn(files):
    run("plan", "lengths.npy", *OPTIONS, "--plot", "plan.png", "-o", "plan.json")
    run("report", "plan.json", "lengths.npy", "--plot", "report.png")
    for name in ("plan.png", "report.png"):
        image = matplotlib.image.imread(files / name)
        assert image.shape[0] > 400 and image.std() > 0.1


def test_it_is_a_command_and_a_module(files):
    for command in ([sys.executable, "-m", "jaxbucket"], ["jaxbucket"]):
        if command == ["jaxbucket"]:
            command = [str(pathlib.Path(sys.executable).parent / "jaxbucket")]
        done = subprocess.run(
            [*command, "plan", "lengths.npy", "--max-tokens", "500"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "steps per epoch" in done.stdout


def test_planning_by_command_needs_no_jax(files):
    code = (
        "import sys; from jaxbucket.cli import main; "
        "main(['plan', 'lengths.npy', '--max-tokens', '500'], standalone_mode=False); "
        "print(sorted({'jax', 'grain', 'flax', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "x.npy", "is no whole numpy file"),
        (b"", "x.npz", "is no whole numpy file"),
        (b"\x93NUMPY", "x.npy", "is no whole numpy file"),
        (b"3\n4.5\n", "x.txt", "not text with one integer on each line"),
        (b"three\n", "x.txt", "not text with one integer on each line"),
        (b"\xff\xfe", "x.txt", "is no text file"),
        (b"", "x.txt", "`lengths` is empty"),
        (b"3\n0\n", "x.txt", "`lengths[1]=0`: a length must be between 1"),
        (b"9\n500\n", "x.txt", "`max_tokens=64` holds 0 rows of `seq_len=500`"),
    ],
)
def test_lengths_that_are_none_are_refused(files, content, name, message):
    (files / name).write_bytes(content)
    assert message in refused("plan", name, "--max-tokens", 64)


def test_every_cut_numpy_file_is_refused(files):
    whole = {name: (files / name).read_bytes() for name in ("lengths.npy", "one.npz")}
    for name, data in whole.items():
        for size in range(0, len(data), 97):
            (files / name).write_bytes(data[:size])
            assert "is no whole numpy file" in refused(
                "plan", name, "--max-tokens", 4096
            )


def test_an_array_that_is_not_there_is_named(files):
    message = "has ['lengths', 'others']: name one of them by `--column`"
    assert message in refused("plan", "two.npz", "--max-tokens", 500)
    assert message in refused("plan", "two.npz", "--max-tokens", 500, "--column", "x")


def test_text_has_no_column(files):
    output = refused("plan", "lengths.txt", "--max-tokens", 500, "--column", "x")
    assert "is no .npz file: no `--column`" in output


def test_an_array_without_a_name_has_no_column(files):
    output = refused("plan", "lengths.npy", "--max-tokens", 500, "--column", "x")
    assert "has one array, without a name" in output


def test_a_numpy_file_may_have_the_other_name(files):
    (files / "swapped.npy").write_bytes((files / "one.npz").read_bytes())
    (files / "swapped.npz").write_bytes((files / "lengths.npy").read_bytes())
    for name in ("swapped.npy", "swapped.npz"):
        run("plan", name, *OPTIONS, "-o", "plan.json")
        assert BucketPlan.from_json((files / "plan.json").read_text()) == PLAN


def test_a_folder_that_is_not_there_is_refused(files):
    for option in ("-o", "--plot"):
        output = refused("plan", "lengths.npy", *OPTIONS, option, "nowhere/x.png")
        assert "No such file or directory: 'nowhere/x.png'" in output


def test_what_is_read_is_not_overwritten(files):
    before = (files / "lengths.npy").read_bytes()
    for options in (
        ("-o", "lengths.npy"),
        ("-o", files / "lengths.npy"),
        ("--plot", "lengths.npy"),
        ("-o", "same.png", "--plot", "same.png"),
    ):
        output = refused("plan", "lengths.npy", *OPTIONS, *options)
        assert "would overwrite what this command reads or writes" in output
    assert (files / "lengths.npy").read_bytes() == before


def test_a_plan_that_is_none_is_refused(files):
    (files / "cut.json").write_text(PLAN.to_json()[:-5])
    assert "The plan is not valid JSON" in refused("report", "cut.json", "lengths.npy")
    (files / "other.json").write_text("{}")
    assert "jaxbucket.BucketPlan" in refused("report", "other.json", "lengths.npy")


def test_a_picture_of_an_unknown_kind_is_refused(files):
    output = refused("plan", "lengths.npy", *OPTIONS, "--plot", "plan.docx")
    assert "`--plot plan.docx`" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.npy", "--max-tokens", 8], "'nowhere.npy' does not exist"),
        (["lengths.npy"], "Missing option '--max-tokens'"),
        (["lengths.npy", "--max-tokens", 0], "0 is not in the range x>=1"),
        (["lengths.npy", "--max-tokens", "many"], "'many' is not a valid integer"),
        (
            ["lengths.npy", "--max-tokens", 8, "--overlong", "cut"],
            "'cut' is not one of",
        ),
    ],
)
def test_options_that_are_none_are_refused(files, arguments, message):
    assert message in run("plan", *arguments, code=2)


def test_unknown_boundaries_are_refused(files):
    output = refused("plan", "lengths.npy", *OPTIONS, "--boundaries", "even")
    assert "`boundaries='even'`: choose one of" in output
