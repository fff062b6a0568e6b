"""Names that are imported on first use, and the extra that some of them need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from etils import epy

# Library -> the extra that installs it.
_EXTRAS = {
    **dict.fromkeys(("absl", "flax", "grain", "jax", "jaxlib", "optax"), "train"),
    **{"orbax": "train", "pyarrow": "files", "matplotlib": "plots"},
}


@contextlib.contextmanager
def lazy_names(globals_: dict[str, Any]) -> Iterator[None]:
    """Imports the names of a package on first use.

    Args:
      globals_: the `globals()` of the package, which the block imports into.
    """
    with epy.lazy_api_imports(globals_):
        yield
    import_name = globals_["__getattr__"]
    # Decorated, it names the extra that is missing.
    globals_["__getattr__"] = naming_the_extra()(import_name)


@contextlib.contextmanager
def naming_the_extra() -> Iterator[None]:
    """Adds to the error of a missing library how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(str(error.name).partition(".")[0])
        if extra is None:
            raise
        # Without a `name`, so that no other block adds the same again.
        raise ModuleNotFoundError(
            f"{error}. Planning does not need it, but this part of jaxbucket does: pip "
            f"install 'jaxbucket[{extra}]'."
        ) from error
