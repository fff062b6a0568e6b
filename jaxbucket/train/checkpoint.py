"""Checkpoints of a state and of its place in the data, written by Orbax.

Orbax writes beside the training and makes a checkpoint appear whole or not at all. What
it does not notice later is a file that was deleted, cut or changed: so every checkpoint
is sealed with the sizes and digests of its files before it appears.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.tree_util import keystr

from jaxbucket.base.checks import check_positive
from jaxbucket.base.position import DataPosition
from jaxbucket.distributed.differences import list_processes
from jaxbucket.distributed.processes import Processes

_SEAL = "seal.json"
# Orbax notes in the first when the checkpoint appeared, after the seal, and may write
# the second then.
_STAMP = "_CHECKPOINT_METADATA"
_APPEARED = "commit_success.txt"
# The system releases it, however its process ends.
_LOCK = ".lock"
_HALF_WRITTEN = ".orbax-checkpoint-tmp"
_TOKEN = ".seen-by-all"
# A file system over a network may show a new file a little later.
_SECONDS_TO_SEE = 5.0


class Restored(NamedTuple):
    """What `Checkpoints.restore` returns.

    Attributes:
      state: the state, in the shardings asked for.
      position: where in the data to go on, for `BatchDataset.resume`.
      extra: what else was saved.
    """

    state: Any
    position: DataPosition
    extra: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, in a directory of their own.

    Example:
      >>> import tempfile, jaxbucket as jb
      >>> source = [{"x": [1, 2]}, {"x": [3]}]
      >>> plan = jb.plan_buckets([2, 1], max_tokens=4)
      >>> dataset = jb.batch_dataset(source, jb.BatchSchedule(plan, [2, 1]))
      >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
      ...     checkpoints.save({"w": jax.numpy.ones(3)}, dataset.position(1))
      ...     state, position, _ = checkpoints.restore({"w": jax.numpy.zeros(3)})
      >>> print(state["w"], len(dataset.resume(position)))
      [1. 1. 1.] 0

    Args:
      directory: a path, or a URL that Orbax knows, such as gs://...
      keep: how many of the newest checkpoints stay.
      processes: those that save together; all have to make this. Where one cannot
        write, it ends, and so all: they would wait for its part of the checkpoint.

    Raises:
      ValueError: if `keep` is not positive, or the directory cannot be one, or some of
        the processes do not see what process 0 writes there.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        processes: Processes | None = None,
    ):
        self._directory = epath.Path(directory).expanduser().absolute()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"`directory={str(directory)!r}` cannot be a folder: {error}. Name "
                "another."
            ) from None
        self._processes = processes
        if processes is not None:
            self._check_shared(processes)
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "position": ocp.JsonCheckpointHandler(),
                "extra": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                max_to_keep=check_positive("keep", keep),
                async_options=ocp.AsyncOptions(
                    post_finalization_callback=self._seal,
                    barrier_sync_fn=self._barrier,
                ),
            ),
        )
        # The step that was last saved or restored here: what the run goes on from.
        self._last: int | None = None
        self._saving: int | None = None
        self._is_open = True
        if processes is not None:
            processes.at_end(self._finish)
        self._claimed = False
        self._lock: IO[str] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Where Orbax waits for all processes beside the training.

        The one that cannot write waits there, too, before it raises: it ends here, and
        so all others.
        """
        error = sys.exception()
        # The one that saves may do so where it handles another error.
        if error and self._processes and threading.get_ident() != self._saving:
            self._processes.fail(error)
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _check_shared(self, processes: Processes) -> None:
        """Where each has a directory of its own, saving would wait for ever."""
        (name, *_) = processes.gather("token", f"{_TOKEN}-{uuid.uuid4().hex}")
        token = self._directory / name
        if processes.index == 0:
            token.touch()
        processes.gather("token written", "")
        seen = processes.gather("token seen", str(_appears(token)))
        if processes.index == 0:
            token.unlink()
        blind = [index for index, answer in enumerate(seen) if answer != str(True)]
        if blind:
            raise ValueError(
                f"`directory={str(self._directory)!r}` is not the same everywhere: "
                f"what process 0 writes there, {list_processes(blind)} cannot see. "
                "Name one that all of them share."
            )

    def close(self) -> None:
        """Waits until what is being written is there."""
        self._is_open = False
        try:
            self._manager.close()
        finally:
            if self._lock:
                self._lock.close()
                self._lock = None

    def _finish(self) -> None:
        if self._is_open:
            self.wait()

    def wait(self) -> None:
        """Waits until what is being written is there.

        Raises:
          OSError: for what could not be written, such as on a full disk.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            failed = self._last
            self._manager.reload()
            self._last = self._manager.latest_step()
            newest = "none" if self._last is None else f"that of step {self._last}"
            raise OSError(
                f"The checkpoint of step {failed} could not be written to "
                f"{self._directory}: {error}. The newest that is there is {newest}."
            ) from error

    @property
    def latest_step(self) -> int | None:
        """The newest checkpoint's step, or None if there is none."""
        self.wait()
        return self._manager.latest_step()

    def save(
        self,
        state: Any,
        position: DataPosition,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Copies the state, and returns while it is being written.

        The state may be donated at once. At the step that was saved or restored last
        it does nothing: the state is the same.

        Args:
          state: a pytree of arrays, as after `position.step` updates.
          position: from `BatchDataset.position`.
          extra: what else to keep, for JSON.

        Raises:
          ValueError: if the state has something other than arrays and numbers, or two
            leaves of one name; if the directory has the checkpoints of another run, or
            another process saves there, the step is before the last one, or `extra` is
            no JSON.
        """
        _check_can_be_saved(state)
        self.claim()
        newest = self.latest_step
        if newest != self._last:
            raise ValueError(
                f"{self._directory} has a checkpoint of step {newest}, which this run "
                "did not begin with: restore it, or name another folder."
            )
        if newest is not None and position.step <= newest:
            if position.step == newest:
                return
            raise ValueError(
                f"`position.step={position.step}` is before step {newest}, the last "
                f"one in {self._directory}: name another folder."
            )
        try:
            text = json.dumps(dict(extra or {}), allow_nan=False)
            more: dict[str, Any] = json.loads(text)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`extra` is no JSON: {error}.") from None
        self._clear_half_written()
        self._last = position.step
        self._saving = threading.get_ident()
        self._manager.save(
            position.step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                position=ocp.args.JsonSave(position.to_dict()),
                extra=ocp.args.JsonSave(more),
            ),
        )

    def restore(self, state: Any) -> Restored:
        """Reads the newest checkpoint.

        Args:
          state: a state like the one saved, or the shapes, dtypes and shardings of
            one; arrays are read straight into these shardings. Where it has a Python
            number, such as the `step=0` of a new Flax `TrainState`, one comes back;
            scalars stay weakly typed, and arrays on no device in particular
            uncommitted. A step that was compiled for `state` takes what comes back.

        Raises:
          ValueError: if there is no checkpoint, a file of it is missing, cut or
            changed, or the state was of another model or optimizer. Nothing is
            written, and no other checkpoint is taken instead.
        """
        step = self.latest_step
        if step is None:
            raise ValueError(
                f"There is no checkpoint in {self._directory}: name the folder of a "
                "run, or begin one."
            )
        folder = self._directory / str(step)
        self._check_seal(folder)
        abstract = jax.tree.map(_abstract, state)
        self._check_state(folder, step, abstract)
        saved: Any = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract),
                position=ocp.args.JsonRestore(),
                extra=ocp.args.JsonRestore(),
            ),
        )
        position = DataPosition.from_dict(saved.position)
        if position.step != step:
            is_ = f"is of step {position.step}"
            raise ValueError(self._damaged(folder, "position", is_))
        self._check_keys(folder, state, saved.state)
        self._last = step
        restored = jax.tree.map(_like, state, saved.state)
        return Restored(restored, position, saved.extra)

    def claim(self) -> None:
        """Makes this the only run that saves here, for as long as it lives.

        The first `save` does it, if it was not done before: best at the beginning.

        Raises:
          ValueError: if another run saves in this folder.
        """
        if self._claimed:
            return
        if jax.process_index() == 0 and "://" not in os.fspath(self._directory):
            self._lock = self._locked()
        # What another one has saved since it was looked at is seen now.
        self._manager.reload()
        self._claimed = True

    def _locked(self) -> IO[str]:
        lock = open(self._directory / _LOCK, "a")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ValueError(
                f"Another run saves in {self._directory}: wait for its end, or name "
                "another folder."
            ) from None
        except OSError:
            # Not every file system has locks.
            pass
        return lock

    def _clear_half_written(self) -> None:
        """Removes what a killed process left; nothing else is being written now."""
        if jax.process_index() == 0:
            for path in self._directory.glob(f"*{_HALF_WRITTEN}*"):
                path.rmtree()

    def _seal(self) -> None:
        """Called when all files are written, before the checkpoint appears."""
        if jax.process_index() != 0:
            return
        folder = self._directory / str(self._last)
        if not folder.exists():
            (folder,) = self._directory.glob(f"{self._last}{_HALF_WRITTEN}*")
        files = {name: _digest(path) for name, path in _files(folder).items()}
        (folder / _SEAL).write_text(json.dumps(files))

    def _check_seal(self, folder: epath.Path) -> None:
        """Raises a ValueError that names the first file that is not as it was."""
        try:
            sealed = json.loads((folder / _SEAL).read_text())
            sealed = {name: (size, digest) for name, (size, digest) in sealed.items()}
        except FileNotFoundError:
            raise ValueError(self._damaged(folder, _SEAL, "is missing")) from None
        except (ValueError, TypeError, AttributeError, OSError):
            raise ValueError(self._damaged(folder, _SEAL, "is cut")) from None
        present = _files(folder)
        for name in sealed.keys() - present.keys():
            raise ValueError(self._damaged(folder, name, "is missing"))
        for name in present.keys() - sealed.keys() - {_SEAL, _APPEARED}:
            raise ValueError(self._damaged(folder, name, "was not there"))
        for name, was in sealed.items():
            if name == _STAMP:
                if not _is_json_object(present[name]):
                    raise ValueError(self._damaged(folder, name, "is cut"))
            elif present[name].stat().length != was[0]:
                is_ = f"has {present[name].stat().length} bytes, not {was[0]}"
                raise ValueError(self._damaged(folder, name, is_))
            elif _digest(present[name]) != was:
                raise ValueError(self._damaged(folder, name, "was changed"))

    def _damaged(self, folder: epath.Path, name: str, is_: str) -> str:
        older = [step for step in self._manager.all_steps() if str(step) != folder.name]
        remedy = (
            f"delete that folder to go on from step {max(older)}"
            if older
            else "there is no older one to go on from"
        )
        return f"The checkpoint {folder} is damaged, for {name} {is_}: {remedy}."

    def _check_state(self, folder: epath.Path, step: int, abstract: Any) -> None:
        metadata = self._manager.item_metadata(step).state
        saved, given = _leaves(metadata), _leaves(abstract)
        # What was chosen is named before what follows from it.
        names = saved.keys() | given.keys()
        for name in sorted(names, key=lambda name: ("params" not in name, name)):
            was, now = saved.get(name), given.get(name)
            if not _same_type(was, now):
                raise _another_state(folder, name, _type_name(now), _type_name(was))
        # Lists and dicts of the same names.
        # The states of optax without numbers keep their places in a chain.
        serialized = ocp.tree.serialize_tree(abstract, keep_empty_nodes=True)
        was, now = _paths(metadata.tree), _paths(serialized)
        for name, path in now.items():
            if path != was[name]:
                raise _another_state(
                    folder, name, f"`state{path}`", f"`state{was[name]}`"
                )

    def _check_keys(self, folder: epath.Path, state: Any, restored: Any) -> None:
        """What Orbax takes for the same: keys of any kind, and their words."""
        leaves = zip(
            jax.tree.leaves_with_path(state), jax.tree.leaves(restored), strict=True
        )
        for (path, leaf), read in leaves:
            if hasattr(leaf, "dtype") and leaf.dtype != read.dtype:
                raise _another_state(folder, _name(path), leaf.dtype, read.dtype)


def _another_state(folder: epath.Path, name: str, now: Any, was: Any) -> ValueError:
    return ValueError(
        f"The checkpoint {folder} is of another model or optimizer, because {name} is "
        f"{now}, but was {was}: build what was saved."
    )


def _check_can_be_saved(state: Any) -> None:
    """Raises a ValueError that names the leaf that is not an array or a number."""
    names: dict[str, str] = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        where = f"`state{keystr(path)}`"
        _check_leaf(where, leaf)
        name = _name(path)
        if name in names:
            raise ValueError(
                f"{where} and {names[name]} are both called {name!r} in a checkpoint: "
                "rename one of them."
            )
        names[name] = where


def _check_leaf(where: str, leaf: Any) -> None:
    # Words, objects and times of numpy are not numbers.
    is_array = isinstance(leaf, jax.Array) or (
        isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "USOmM"
    )
    if is_array or isinstance(leaf, bool | float):
        if np.size(leaf) == 0:
            raise ValueError(
                f"{where} has shape {np.shape(leaf)}, and Orbax saves no empty arrays: "
                "leave it out, or put None in its place."
            )
    elif isinstance(leaf, int):
        if not -(2**63) <= leaf < 2**63:
            raise ValueError(
                f"{where} is {leaf}, and an integer must fit into 64 bits: make it "
                "an array of several."
            )
    else:
        raise ValueError(
            f"{where} is a {type(leaf).__name__}, and a checkpoint holds arrays, "
            "numbers and keys of jax: put it into `extra`, or make it static."
        )


def _abstract(leaf: Any) -> Any:
    """What Orbax is asked for in place of a leaf."""
    # It restores arrays and Python's numbers, and not numpy's.
    leaf = np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    return ocp.utils.to_shape_dtype_struct(leaf)


def _like(template: Any, leaf: Any) -> Any:
    """A leaf that was read, as free to move and as weakly typed as was asked for.

    Orbax knows neither: a step would be compiled again for it, or refuse it beside
    batches on several devices.
    """
    free = isinstance(template, jax.Array) and not template.committed
    if getattr(template, "weak_type", False) and leaf.shape == ():
        # The type of a Python number is weak.
        return jax.device_put(leaf.item(), None if free else leaf.sharding)
    if not free:
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.array(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.array(np.asarray(leaf))


def _leaves(tree: Any) -> dict[str, Any]:
    """The arrays and numbers of a tree by name."""
    leaves = ocp.tree.to_flat_dict(tree, sep=".").items()
    return {name: leaf for name, leaf in leaves if leaf is not None}


def _paths(tree: Any) -> dict[str, str]:
    """Name -> where it is, as Python writes it: `['a'][0]`."""
    leaves = jax.tree.leaves_with_path(tree)
    return {_name(path): keystr(path) for path, _ in leaves}


def _name(path: Any) -> str:
    """What Orbax calls a leaf."""
    return keystr(path, simple=True, separator=".")


_KINDS = {bool: np.bool_, int: np.integer, float: np.floating}


def _same_type(was: Any, now: Any) -> bool:
    """Whether a leaf can be restored as what is asked for, without a loss."""
    if was is None or now is None:
        return False
    if hasattr(now, "dtype"):
        return (was.dtype, tuple(was.shape)) == (now.dtype, tuple(now.shape))
    # A jitted step returns an array where it was given a Python number.
    return was.shape == () and jnp.issubdtype(was.dtype, _KINDS[type(now)])


def _type_name(leaf: Any) -> str:
    if leaf is None:
        return "not there"
    if hasattr(leaf, "dtype"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return f"a Python {type(leaf).__name__}"


def _files(folder: epath.Path) -> dict[str, epath.Path]:
    """Every file below a folder, by its name from there."""
    return dict(_walk(folder, ""))


def _walk(folder: epath.Path, prefix: str) -> Iterator[tuple[str, epath.Path]]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _walk(path, f"{prefix}{path.name}/")
        else:
            yield prefix + path.name, path


def _digest(path: epath.Path) -> tuple[int, str]:
    """The size of a file, and a digest of what is in it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, _blake2b)  # pyright: ignore
    return path.stat().length, digest.hexdigest()


def _blake2b() -> Any:
    return hashlib.blake2b(digest_size=16)


def _is_json_object(path: epath.Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text()), dict)
    except ValueError:
        return False


def _appears(path: epath.Path) -> bool:
    deadline = time.monotonic() + _SECONDS_TO_SEE
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
