"""jax's flags and contexts, in words that are the same in every process.

jax names what changes tracing, but not all of it: its PRNG implementation is missing.
So every flag counts that is not known to be immaterial, a flag of a later jax, too.
"""

from __future__ import annotations

import enum
import hashlib
import pickle
import re
import uuid
from collections.abc import Mapping
from typing import Any

import jax

# There is no public way to the contexts that tracing depends on, such as a mesh, or to
# the names of the flags that it depends on.
from jax._src import config as jax_config

# Caches, logs, dumps, error messages, guards, timeouts and connections. Which devices
# there are is seen by the devices themselves.
_IMMATERIAL = re.compile(
    r"jax_("
    r"(enable_)?compilation_cache.*|persistent_cache_.*|raise_persistent_cache_errors"
    r"|share_binary_between_hosts.*|remove_custom_partitioning_ptr_from_cache_key"
    r"|explain_cache_misses|log_.*|logging_level|debug_log_modules|distributed_.*"
    r"|compiler_detailed_logging_min_ops|dump_.*|include_debug_info_in_dumps"
    r"|pprint_use_color|traceback_filtering|tracer_error_num_traceback_frames"
    r"|captured_constants_.*|transfer_guard.*|array_garbage_collection_guard"
    r"|thread_guard|check_tracer_leaks|debug_leaked_clients_on_clear_backends"
    r"|cross_host_.*|mtls_.*|check_proxy_envs|enable_preemption_service"
    r"|cpu_get_.*_timeout_minutes|platforms|platform_name|\w+_visible_devices"
    r"|num_cpu_devices"
    r")"
)
# Flags that change tracing, and what XLA makes of a program as well.
_OF_THE_COMPILER = {
    "jax_enable_pgle",
    "jax_pgle_profiling_runs",
    "jax_xla_profile_version",
    "jax_use_shardy_partitioner",
}


def trace_settings() -> dict[str, Any]:
    """What tracing in this thread depends on, apart from code and arguments."""
    return {
        "flags": _flags(),
        "contexts": _contexts(),
        "backend": jax.default_backend(),
    }


def compiler_flags() -> dict[str, Any]:
    """The flags that may change what XLA makes of a program."""
    shown_by_the_program = set(_trace_names()) - _OF_THE_COMPILER
    return {name: x for name, x in _flags().items() if name not in shown_by_the_program}


def _flags() -> dict[str, Any]:
    values = getattr(jax.config, "values", None)
    if not isinstance(values, Mapping):
        return {"unknown": _different()}
    return {
        name: _in_words(value)
        for name, value in values.items()
        if not _IMMATERIAL.fullmatch(name)
    }


def _contexts() -> list[Any]:
    """Meshes, metadata and whatever else was entered, as `with` does."""
    try:
        values = tuple(jax_config.trace_context())
    except (AttributeError, TypeError):
        return [_different()]
    names = _trace_names()
    # Packages add contexts when they are imported, which nobody may have entered.
    entered = [
        [name, _in_words(value)]
        for name, value in zip(names or range(len(values)), values, strict=True)
        if value is not None and value is not False
    ]
    return [_in_words(jax.sharding.get_mesh()), *entered]


def _trace_names() -> tuple[str, ...]:
    try:
        return jax_config.trace_context_names()
    except (AttributeError, NotImplementedError):
        # A jax that does not name them: what changes tracing counts for the compiler.
        return ()


def _in_words(value: Any) -> Any:
    """A value as JSON, the same in every process for the same value.

    What has no such words differs from everything else.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, tuple | list):
        return [type(value).__name__, *map(_in_words, value)]
    if isinstance(value, set | frozenset):
        return [type(value).__name__, *sorted(str(_in_words(x)) for x in value)]
    if isinstance(value, Mapping):
        return sorted(str([_in_words(key), _in_words(value[key])]) for key in value)
    if isinstance(value, jax.Device):
        return f"{value.platform} {value.id}"
    if isinstance(value, jax.sharding.Mesh):
        devices = [_in_words(device) for device in value.devices.flat]
        return [f"{dict(value.shape)} {value.axis_types}", devices]
    if isinstance(value, jax.sharding.AbstractMesh):
        return str(value)
    return _pickled(value)


def _pickled(value: Any) -> str:
    # What xla_metadata is kept in has a hash beside it, another one in every process.
    metadata = getattr(value, "val", None)
    if isinstance(metadata, dict):
        return str(_in_words(metadata))
    try:
        return hashlib.sha256(pickle.dumps(value)).hexdigest()
    # What cannot be pickled says so in many ways.
    except Exception:
        return _different()


def _different() -> str:
    """For what is not known: no start is like another one, and all is traced."""
    return uuid.uuid4().hex
