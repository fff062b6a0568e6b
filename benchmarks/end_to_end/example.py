"""The documents and the model of `examples/`, which is not an installed package."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
import documents as documents
import transformer as transformer
