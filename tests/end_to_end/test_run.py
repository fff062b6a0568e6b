"""The examples as a user starts them: in a process of their own."""

import importlib
import json
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

TRAIN_LM = pathlib.Path(__file__).parents[2] / "examples" / "train_lm.py"
SMALL = (
    *("--steps", "6", "--width", "16", "--layers", "1", "--max-len", "64"),
    *("--max-tokens", "512", "--num-buckets", "2"),
)


def train_lm(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", TRAIN_LM, *SMALL, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def jsonl(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "data.jsonl"
    lines = [
        json.dumps({"body": f"document {n} " + "x" * (n % 90)}) for n in range(200)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


# A run on one device is in test_resume.py.
@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["jit", "shard_map"])
def test_trains_on_simulated_devices_without_a_recompile(jsonl, tmp_path, mode):
    out = tmp_path / "summary.json"
    run = train_lm(
        *("--data", jsonl, "--field", "body", "--devices", 4),
        *("--mode", mode, "--json", out, "--dropout", 0.1),
    )
    assert run.returncode == 0, run.stderr
    summary = json.loads(out.read_text())
    assert len(summary["devices"]) == 4
    shapes = len(summary["plan"]["buckets"])
    for step in ("train_step", "eval_step"):
        assert summary["compile"][step]["ahead"] == shapes
        assert summary["compile"][step]["later"] == 0
        assert f"{step} compiled {shapes} times" in " ".join(run.stdout.split())
    seen = summary["epoch"]["examples"] + summary["held_out"]["documents"]
    assert seen == 200
    assert summary["train"]["steps"] == 6
    assert 0 < summary["held_out"]["bits_per_byte"] < 16


@pytest.mark.exhaustive
@pytest.mark.parametrize("cost", ["tokens", "time"])
def test_it_packs_rows_where_that_is_asked_for(jsonl, tmp_path, cost):
    out, folder = tmp_path / "summary.json", tmp_path / "run"
    options = (
        *("--data", jsonl, "--field", "body", "--pack", "always", "--cost", cost),
        *("--checkpoint", folder, "--json", out, "--devices", 4),
    )
    run = train_lm(*options)
    assert run.returncode == 0, run.stderr
    assert "Rows are packed" in " ".join(run.stdout.split())
    summary = json.loads(out.read_text())
    epoch = summary["epoch"]
    assert epoch["packed_examples"] + summary["held_out"]["documents"] == 200
    assert epoch["examples"] < epoch["packed_examples"]
    assert summary["compile"]["train_step"]["later"] == 0
    # It goes on in the same rows, also where they were planned by time.
    run = train_lm(*options, "--steps", 9, "--resume")
    assert run.returncode == 0, run.stderr
    assert "Going on at step 6." in run.stdout
    again = json.loads(out.read_text())
    assert again["plan"] == summary["plan"] and again["schedule"] == summary["schedule"]
    run = train_lm(*options, "--steps", 12, "--pack", "never", "--resume")
    assert run.returncode == 1
    assert "packing" in run.stderr or "--pack always -> never" in run.stderr


@pytest.mark.exhaustive
def test_all_ways_are_compared_side_by_side(jsonl, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    out, picture = tmp_path / "compare.json", tmp_path / "compare.png"
    run = train_lm(
        *("--data", jsonl, "--field", "body", "--compare", "--seconds", 3),
        *("--json", out, "--plot", picture, "--devices", 2),
    )
    assert run.returncode == 0, run.stderr
    summaries = json.loads(out.read_text())
    assert list(summaries) == ["bucketed", "pad-to-max", "dynamic", "grain-pack"]
    for policy, summary in summaries.items():
        compiled = summary["compile"]["train_step"]
        shapes = len(summary["buckets"])
        if policy == "dynamic":
            assert (compiled["ahead"], compiled["later"]) == (0, shapes)
        else:
            assert compiled["later"] == 0
        assert (policy == "bucketed") == (compiled["ahead"] == 2)
        # Held out are the same documents, and all of them, in every way.
        assert summary["held_out"]["documents"] == sum(
            summary["held_out"]["documents"] for summary in summaries.values()
        ) / len(summaries)
        assert summary["seconds"] >= 3
        assert 0 < summary["held_out"]["bits_per_byte"] < 16
        seconds = [point["seconds"] for point in summary["curve"]]
        assert seconds == sorted(seconds)
        assert seconds[-1] == summary["seconds"]
        assert re.search(rf"^ *{policy} +{shapes} ", run.stdout, re.MULTILINE)
    assert picture.stat().st_size > 10_000
    # None has found what another one compiled.
    assert not list(cache.iterdir())


@pytest.mark.exhaustive
def test_a_way_that_fails_ends_the_comparison(tmp_path):
    run = train_lm(
        *("--data", tmp_path / "nowhere.txt", "--compare", "--seconds", 3),
    )
    assert run.returncode == 1
    assert "does not exist" in run.stderr


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="finds the child in /proc")
def test_a_comparison_that_is_ended_leaves_nobody_training(jsonl):
    options = ("--data", jsonl, "--field", "body", "--compare", "--seconds", 60)
    with subprocess.Popen(
        [sys.executable, TRAIN_LM, *SMALL, *map(str, options)], stdout=subprocess.PIPE
    ) as run:
        children = pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children")
        deadline = time.monotonic() + 60
        while not children.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (child,) = children.read_text().split()
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT
    deadline = time.monotonic() + 10
    state = pathlib.Path(f"/proc/{child}/stat")
    # Where nobody has waited for it yet, it is a zombie.
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.exhaustive
def test_what_was_compared_before_a_failure_is_shown(jsonl, tmp_path):
    # The dynamic way may not make a batch of 3 rows on 2 devices: the third fails.
    out = tmp_path / "compare.json"
    run = train_lm(
        *("--data", jsonl, "--field", "body", "--compare", "--seconds", 1),
        *("--devices", 2, "--batch-size-multiple", 1, "--max-tokens", 512),
        *("--json", out),
    )
    assert run.returncode == 1
    assert "cannot be cut into 2 equal parts" in run.stderr
    assert list(json.loads(out.read_text())) == ["bucketed", "pad-to-max"]
    assert re.search(r"^ *pad-to-max ", run.stdout, re.MULTILINE)


def test_reads_text_lines_and_folders(documents, tmp_path):
    text = tmp_path / "lines.txt"
    text.write_text("\n".join(f"line {n}" for n in range(150)))
    folder = tmp_path / "folder"
    folder.mkdir()
    for n in range(100):
        (folder / f"{n}.md").write_text(f"# File {n}\n")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff")
    for data, count in ((text, 150), (folder, 100)):
        split = documents.load(str(data))
        assert len(split.train) + len(split.held_out) == count


def test_a_moved_file_is_split_as_it_was(documents, jsonl, tmp_path):
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(jsonl.read_bytes())
    first, second = (documents.load(str(path), "body") for path in (jsonl, moved))
    assert first.train.fingerprint == second.train.fingerprint
    assert len(first.held_out) == len(second.held_out) > 0


def test_every_byte_of_the_documents_is_in_their_fingerprint(documents, jsonl):
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
    monkeypatch.syspath_prepend(TRAIN_LM.parent)
    return importlib.import_module("documents")


def write(path: pathlib.Path, content: bytes) -> pathlib.Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "has no text. Give a file"),
        ("blank.txt", b"\n \n", "has no text. Give a file"),
        ("one.txt", b"a line\n", "has 1 distinct documents, too few to hold some out"),
        ("broken.jsonl", b'{"text": "a"}\n{"te', "broken.jsonl:2 is not JSON"),
        (
            "other.jsonl",
            b'{"body": "a"}',
            "has no text in 'text', but ['body']. Name it",
        ),
        ("number.jsonl", b'{"text": 3}', "has no text in 'text'"),
        ("list.jsonl", b"[1]", "has no text in 'text', but no fields"),
        ("latin.txt", b"caf\xe9\n", "is not UTF-8 text"),
        ("table.csv", b"a,b\n", "is no folder, .jsonl or .txt file"),
    ],
)
def test_unreadable_data_is_refused(documents, tmp_path, name, content, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        documents.load(str(write(tmp_path / name, content)))


def test_missing_data_is_refused_in_one_sentence(tmp_path):
    run = train_lm("--data", tmp_path / "nowhere.txt")
    assert run.returncode == 1
    assert re.fullmatch(
        r"train_lm.py: `--data .*nowhere.txt` does not exist. Check the path.\n",
        run.stderr,
    )


def test_the_standard_library_is_split_by_file(documents):
    def texts(examples):
        return {example["tokens"].tobytes().decode() for example in examples}

    split = documents.load()
    train, held_out = texts(split.train), texts(split.held_out)
    assert len(train) == len(split.train) > 1000
    assert len(held_out) == len(split.held_out) > 20
    assert not train & held_out
    assert all(x.startswith(("def ", "class ", "async ", "@")) for x in train)
    sides = {}
    for document in documents.standard_library():
        # A text that stands in several files is only in the first.
        if document.text not in sides:
            sides[document.text] = document.origin
    assert not {sides[x] for x in train} & {sides[x] for x in held_out}


def test_devices_that_do_not_divide_a_batch_are_refused(jsonl):
    run = train_lm("--data", jsonl, "--field", "body", "--devices", 3)
    assert run.returncode == 1
    assert "cannot be cut into 3 equal parts by the mesh axes ('data',)" in run.stderr
    assert "batch_size_multiple=3" in run.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--policy dynamic --devices 8", "`batch_size=4` cannot be cut into 8 equal"),
        ("--max-tokens 32", "`max_tokens=32` holds 0 rows"),
        ("--max-tokens 32", "Raise `max_tokens` to 256"),
    ],
)
def test_batches_that_cannot_be_are_refused(jsonl, options, message):
    run = train_lm("--data", jsonl, "--field", "body", *options.split())
    assert run.returncode == 1
    assert message in run.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 0", "0 is not positive"),
        ("--steps many", "invalid positive value: 'many'"),
        ("--compare", "--compare needs --seconds"),
        # Each way is started by this very command without `--compare`.
        ("--comp", "unrecognized arguments: --comp"),
        ("--plot x.doc", "x.doc is no .png, .svg or .pdf"),
        ("--seed -1", "-1 is not from 0 to 2**32 - 1"),
        ("--resume", "--resume needs --checkpoint"),
        ("--max-len 100", "100 is no multiple of 32"),
        ("--width 33", "33 is not even"),
        ("--dropout 1", "1.0 is not from 0 to below 1"),
        ("--lr nan", "nan is not positive"),
        ("--data x --json x", "--json names what --data names"),
        ("--json x.png --plot ./x.png", "--plot names what --json names"),
        ("--data docs --checkpoint docs/run", "docs/run is in the folder of --data"),
        ("--pack auto --policy dynamic", "chooses the rows: leave out --policy"),
        ("--pack auto --plan x", "chooses the rows: leave out --plan"),
        (
            "--pack always --num-buckets auto --opening 3",
            "leave out --num-buckets auto, --opening",
        ),
        ("--json nowhere/x.json", "nowhere/x.json is no file in an existing folder"),
    ],
)
def test_options_out_of_range_are_refused(monkeypatch, capsys, options, message):
    monkeypatch.syspath_prepend(TRAIN_LM.parent)
    parse = importlib.import_module("options").parse_arguments
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *options.split()])
    with pytest.raises(SystemExit, match="2"):
        parse()
    assert message in capsys.readouterr().err


def test_a_hidden_folder_in_that_of_the_data_may_be_written(monkeypatch):
    monkeypatch.syspath_prepend(TRAIN_LM.parent)
    parse = importlib.import_module("options").parse_arguments
    args = parse(["--data", "none", "--checkpoint", "none/.run"])
    assert args.checkpoint == "none/.run"


def test_refused_options_end_the_example():
    run = train_lm("--steps", 0)
    assert run.returncode == 2
    assert "0 is not positive" in run.stderr
