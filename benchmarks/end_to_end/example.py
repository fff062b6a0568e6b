"""The documents, model and recipe of `examples/`, which is not a package."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
import documents as documents
import recipe as recipe
import transformer as transformer
