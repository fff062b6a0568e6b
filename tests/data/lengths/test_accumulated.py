"""Metrics that depend on counts over all examples."""

import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxbucket.data import AccumulatedMetric, measure_difficulty, token_rarity
from jaxbucket.data.lengths import count_pass, parallel_pass
from jaxbucket.data.lengths.partial_counts import PartialCounts

VOCAB = 30
CHUNK = 100
SLOW = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Lets passes have several chunks, and save counts after each."""
    monkeypatch.setattr(parallel_pass, "_CHUNK", CHUNK)
    monkeypatch.setattr(count_pass, "_SECONDS_BETWEEN_SAVES", -1)


class Corpus:
    """Random documents. Counts the reads, and may stop at one of them."""

    def __init__(self, size: int = 250, seed: int = 0, stop: int = -1):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 12, size)
        tokens = np.minimum(rng.geometric(0.2, lengths.sum()) - 1, VOCAB - 1)
        self.documents = np.split(tokens, np.cumsum(lengths)[:-1])
        self.stop = stop
        self.reads = 0

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self.reads += 1
        if self.reads == self.stop:
            raise KeyboardInterrupt
        return {"tokens": self.documents[index]}


def rarities(corpus: Corpus, mean: bool = False) -> np.ndarray:
    """The oracle: `[N]` float64."""
    every = np.concatenate(corpus.documents).tolist()
    p = {token: every.count(token) / len(every) for token in set(every)}
    scores = [[-math.log(p[token]) for token in x.tolist()] for x in corpus.documents]
    return np.array([np.mean(x) if mean else np.sum(x) for x in scores])


def measured(source, metric, **options):
    return measure_difficulty(source, metric, progress=False, **options)


def length(example) -> int:
    return len(example["tokens"])


@dataclasses.dataclass
class Threads:
    """A group of processes that are threads of this one."""

    index: int
    count: int
    barrier: threading.Barrier
    values: list[str]

    def gather(self, name: str, value: str) -> list[str]:
        self.values[self.index] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


def in_threads(count: int, function) -> list:
    """Calls a function of a group in `count` threads."""
    barrier, values = threading.Barrier(count), [""] * count
    groups = [Threads(index, count, barrier, values) for index in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(function, groups))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mean", [False, True])
def test_rarity_is_that_of_numpy(tmp_path, seed, mean):
    corpus = Corpus([1, 7, 30, 250][seed], seed)
    metric = token_rarity("tokens", vocab_size=VOCAB, mean=mean)
    want = rarities(corpus, mean)
    exact = measured(corpus, metric, dtype="float64")
    np.testing.assert_allclose(exact, want, rtol=1e-12, atol=1e-12)
    for _ in range(2):
        cached = measured(corpus, metric, cache=tmp_path, cache_key="rarity")
        assert cached.dtype == np.float32 and not cached.flags.writeable
        np.testing.assert_array_equal(cached, exact.astype(np.float32))


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=SLOW)])
def test_all_metrics_are_measured_in_two_passes(tmp_path, num_workers):
    metrics = {
        "rarity": token_rarity(vocab_size=VOCAB),
        "length": length,
        "mean": token_rarity(vocab_size=VOCAB, mean=True),
    }
    for cache in (tmp_path,) if num_workers else (None, tmp_path):
        corpus = Corpus()
        scores = measured(
            corpus,
            metrics,
            num_workers=num_workers,
            cache=cache,
            cache_key={name: name for name in metrics},
        )
        # A sample is read for the fingerprint.
        assert num_workers or 500 <= corpus.reads <= 516
        assert list(scores) == ["length", "mean", "rarity"]
        for name, metric in metrics.items():
            np.testing.assert_array_equal(scores[name], measured(Corpus(), metric))
    # Two files of counts and three of values.
    assert [x.suffix for x in tmp_path.iterdir()] == [".npy"] * 5


@pytest.mark.parametrize("count", [2, 3, 7])
def test_scores_do_not_depend_on_the_number_of_processes(tmp_path, count):
    metric = token_rarity(vocab_size=VOCAB)
    want = measured(Corpus(), metric)

    def share(group):
        options = {"cache": tmp_path, "cache_key": "1", "processes": group}
        return measured(Corpus(), metric, **options)

    np.testing.assert_array_equal(np.concatenate(in_threads(count, share)), want)
    # The counts serve any number of processes: only the scores are measured.
    corpus = Corpus()
    again = measured(corpus, metric, cache=tmp_path, cache_key="1")
    np.testing.assert_array_equal(again, want)
    assert corpus.reads <= 266
    assert len(list(tmp_path.glob("counts-*"))) == 1


def test_processes_need_a_cache_and_the_same_metric():
    def message(group):
        metric = token_rarity(vocab_size=VOCAB + group.index * different)
        with pytest.raises(ValueError) as error:
            measured(Corpus(9), metric, processes=group)
        return str(error.value)

    different = 0
    for text in in_threads(2, message):
        assert text.startswith("`processes` requires `cache` for an `AccumulatedM")
    different = 1
    for text in in_threads(2, message):
        assert "use different functions or dtypes" in text


def test_counts_may_be_dense_sparse_or_repeated():
    def count(example):
        return np.bincount(example["tokens"], minlength=VOCAB)

    def score(example, total):
        assert total.dtype == np.int64 and not total.flags.writeable
        return total[example["tokens"]].sum()

    corpus = Corpus(50)
    total = sum(count(example) for example in corpus)
    want = [total[x].sum() for x in corpus.documents]
    for count_fn in (
        count,
        lambda x: count(x).tolist(),
        lambda x: (x["tokens"], np.ones(len(x["tokens"]), np.uint8)),
        lambda x: (np.arange(VOCAB), count(x)),
    ):
        metric = AccumulatedMetric(count_fn, score, VOCAB)
        assert measured(corpus, metric, dtype="int64").tolist() == want
    nothing = AccumulatedMetric(lambda x: ([], []), lambda x, total: total.max(), 3)
    assert measured(corpus, nothing).tolist() == [0] * 50


@pytest.mark.parametrize("stop", [0, 110, 240, 260, 460])
def test_an_interrupted_run_resumes_in_either_pass(tmp_path, stop):
    metrics = {"rarity": token_rarity(vocab_size=VOCAB), "length": length}
    options = {"cache": tmp_path, "cache_key": {x: x for x in metrics}}
    with pytest.raises(KeyboardInterrupt):
        # After the sample of 16 examples that identifies the source.
        measured(Corpus(stop=17 + stop), metrics, **options)
    corpus = Corpus()
    scores = measured(corpus, metrics, **options)
    # Complete passes and chunks are not read again.
    passes, rest = divmod(stop, 250)
    assert corpus.reads == 16 + 500 - 250 * passes - rest // CHUNK * CHUNK
    np.testing.assert_array_equal(scores["length"], [*map(length, Corpus())])
    rarity = measured(Corpus(), metrics["rarity"])
    np.testing.assert_array_equal(scores["rarity"], rarity)
    assert [x.suffix for x in tmp_path.iterdir()] == [".npy"] * 3


def test_a_metric_that_was_counted_less_is_completed(tmp_path):
    metrics = {
        "a": token_rarity(vocab_size=VOCAB),
        "b": token_rarity(vocab_size=VOCAB, mean=True),
    }
    for name, stop in (("a", 236), ("b", 136)):
        metric = {name: metrics[name]}
        with pytest.raises(KeyboardInterrupt):
            measured(Corpus(stop=stop), metric, cache=tmp_path, cache_key={name: name})
    scores = measured(Corpus(), metrics, cache=tmp_path, cache_key={"a": "a", "b": "b"})
    for name, metric in metrics.items():
        np.testing.assert_array_equal(scores[name], measured(Corpus(), metric))


@pytest.mark.parametrize("damage", ["truncated", "foreign", "other"])
def test_damaged_counts_of_an_interrupted_run_are_replaced(tmp_path, damage):
    metric = token_rarity(vocab_size=VOCAB)
    with pytest.raises(KeyboardInterrupt):
        measured(Corpus(stop=236), metric, cache=tmp_path, cache_key="1")
    (path,) = tmp_path.iterdir()
    if damage == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "foreign":
        path.write_bytes(b"x" * 1000)
    else:
        with path.open("wb") as file:
            np.savez(file, total=np.zeros(3, np.int64), done=np.ones(3, bool))
    corpus = Corpus()
    scores = measured(corpus, metric, cache=tmp_path, cache_key="1")
    assert corpus.reads == 516
    np.testing.assert_array_equal(scores, measured(Corpus(), metric))


@pytest.mark.parametrize("damage", ["truncated", "foreign", "size", "incomplete"])
def test_damaged_counts_are_refused(tmp_path, damage):
    metric = token_rarity(vocab_size=VOCAB)
    measured(Corpus(20), metric, cache=tmp_path, cache_key="1")
    (path,) = tmp_path.glob("counts-*")
    if damage == "truncated":
        os.truncate(path, path.stat().st_size - 8)
    elif damage == "foreign":
        path.write_bytes(b"x" * 1000)
    elif damage == "size":
        # The key has not been changed with the vocabulary.
        metric = token_rarity(vocab_size=VOCAB + 1)
    else:
        np.save(path, np.full(VOCAB + 1, -1))
    message = rf"{path.name} .* Delete the file to measure again"
    with pytest.raises(ValueError, match=message):
        measured(Corpus(20), metric, cache=tmp_path, cache_key="1")


def test_another_source_or_key_is_counted_again(tmp_path):
    metric = token_rarity(vocab_size=VOCAB)
    for number, (seed, key) in enumerate([(0, "1"), (1, "1"), (1, "2")], 1):
        corpus = Corpus(40, seed)
        scores = measured(corpus, metric, cache=tmp_path, cache_key=key)
        np.testing.assert_array_equal(scores, measured(corpus, metric))
        assert len(list(tmp_path.iterdir())) == 2 * number


def test_scores_of_other_counts_are_not_used(tmp_path):
    # The sample that identifies the source does not show that an example has changed.
    corpus = Corpus(40)
    metric = token_rarity(vocab_size=VOCAB)
    old = measured(corpus, metric, cache=tmp_path, cache_key="1")
    (path,) = tmp_path.glob("counts-*")
    path.unlink()
    corpus.documents[1] = np.full(1000, VOCAB - 1)
    new = measured(corpus, metric, cache=tmp_path, cache_key="1")
    np.testing.assert_array_equal(new, measured(corpus, metric))
    assert not np.array_equal(new[2:], old[2:])


def test_a_folder_that_is_not_writable_is_refused_before_counting(tmp_path):
    (tmp_path / "file").touch()
    corpus = Corpus(100)
    with pytest.raises(ValueError, match="is not a writable folder: .* Pass a differ"):
        measured(
            corpus,
            token_rarity(vocab_size=VOCAB),
            cache=tmp_path / "file",
            cache_key="1",
        )
    assert corpus.reads == 16


def test_counts_that_overflow_are_refused():
    counts = PartialCounts.open(None, 2, 3)
    counts.add(0, np.array([1, 2**63 - 1]))
    counts.add(0, np.array([1, 1]))
    assert counts.total.tolist() == [1, 2**63 - 1]
    message = re.escape("The counts of entry 1 add up to more than 2**63 - 1. Return ")
    with pytest.raises(ValueError, match=message):
        counts.add(1, np.array([0, 1]))
    assert counts.done.tolist() == [True, False, False]


SCRIPT = """
import sys, time
import numpy as np
import jaxbucket as jb

class Corpus:
    def __len__(self):
        return 3000
    def __getitem__(self, index):
        time.sleep(0.0003)
        return {"tokens": np.arange(1 + index % 7) % 5}

if __name__ == "__main__":
    scores = jb.data.measure_difficulty(
        Corpus(), jb.data.token_rarity(vocab_size=5), cache=sys.argv[1],
        cache_key="1", progress=False,
    )
    np.save(sys.argv[2], scores)
"""


@pytest.mark.exhaustive
def test_a_run_is_resumed_after_it_is_killed_in_either_pass(tmp_path):
    script, cache, scores = (tmp_path / x for x in ("script.py", "cache", "x.npy"))
    script.write_text(SCRIPT.replace("import jaxbucket as jb", EVERY_CHUNK))

    def start():
        return subprocess.Popen([sys.executable, script, cache, scores])

    def counted():
        return any(np.load(x)["done"].any() for x in cache.glob("*.npz"))

    def scored():
        return any(np.isfinite(np.load(x)).any() for x in cache.glob("d*.partial"))

    for has_begun in (counted, scored):
        with start() as run:
            deadline = time.monotonic() + 100
            while not has_begun():
                assert time.monotonic() < deadline and run.poll() is None
                time.sleep(0.01)
            run.send_signal(signal.SIGKILL)
        assert bool(list(cache.glob("counts-*.npy"))) == (has_begun is scored)
    with start() as run:
        assert run.wait(100) == 0
    corpus = [{"tokens": np.arange(1 + index % 7) % 5} for index in range(3000)]
    want = measured(corpus, token_rarity(vocab_size=5))
    np.testing.assert_array_equal(np.load(scores), want)
    assert [x.suffix for x in cache.iterdir()] == [".npy"] * 2


EVERY_CHUNK = """import jaxbucket as jb
from jaxbucket.data.lengths import count_pass
count_pass._SECONDS_BETWEEN_SAVES = -1"""
