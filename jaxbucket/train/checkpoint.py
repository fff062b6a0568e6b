"""Checkpoints of a state and of its place in the data, written by Orbax.

Orbax writes beside the training and makes a checkpoint appear whole or not at all. What
it does not notice later is a file that was deleted, cut or changed: so every checkpoint
is sealed with the sizes and digests of its files before it appears.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxbucket.base.checks import check_positive
from jaxbucket.base.position import DataPosition
from jaxbucket.distributed.differences import list_processes
from jaxbucket.distributed.processes import Processes
from jaxbucket.train.checkpoint_seal import find_damage, write_seal
from jaxbucket.train.checkpoint_state import (
    abstract_leaf,
    check_can_be_saved,
    check_keys,
    check_like,
    like_template,
)

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
      position: where in the data to go on, for `MeshLoader.resume`.
      extra: what else was saved.
    """

    state: Any
    position: DataPosition
    extra: dict[str, Any]


class _Manager(ocp.CheckpointManager):
    """Orbax's, which leaves it to the loop whether a process is asked to stop."""

    def reached_preemption(self, step: int) -> bool:
        # jax counts the steps that it is asked about. Those of checkpoints, which a
        # thread of Orbax asks about later, would keep it from stopping the loops of
        # all processes before the same step (`StopRequest`).
        return False


class Checkpoints:
    """The checkpoints of one run, in a directory of their own.

    Example:
      >>> import tempfile, jaxbucket as jb
      >>> source = [{"x": [1, 2]}, {"x": [3]}]
      >>> plan = jb.plan_buckets([2, 1], max_tokens=4)
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> batches = jb.MeshLoader(source, jb.BatchSchedule(plan, [2, 1]), mesh)
      >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
      ...     checkpoints.save({"w": jax.numpy.ones(3)}, batches.position(1))
      ...     state, position, _ = checkpoints.restore({"w": jax.numpy.zeros(3)})
      >>> print(state["w"], len(batches.resume(position)))
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
        self._manager = _Manager(
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
        """Waits until what is being written is there, and lets other runs save here."""
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
          position: from `MeshLoader.position`, or a dataset's.
          extra: what else to keep, for JSON.

        Raises:
          ValueError: if the state has something other than arrays and numbers, or two
            leaves of one name; if the directory has the checkpoints of another run, or
            another process saves there, the step is before the last one, or `extra` is
            no JSON.
        """
        check_can_be_saved(state)
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
        if damage := find_damage(folder):
            raise self._damaged(folder, damage)
        abstract = jax.tree.map(abstract_leaf, state)
        check_like(folder, self._manager.item_metadata(step).state, abstract)
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
            raise self._damaged(folder, f"position is of step {position.step}")
        check_keys(folder, state, saved.state)
        self._last = step
        restored = jax.tree.map(like_template, state, saved.state)
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
        write_seal(folder)

    def _damaged(self, folder: epath.Path, damage: str) -> ValueError:
        older = [step for step in self._manager.all_steps() if str(step) != folder.name]
        remedy = "there is no older one to go on from"
        if older:
            remedy = f"delete that folder to go on from step {max(older)}"
        return ValueError(
            f"The checkpoint {folder} is damaged, because {damage}: {remedy}."
        )


def _appears(path: epath.Path) -> bool:
    deadline = time.monotonic() + _SECONDS_TO_SEE
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
