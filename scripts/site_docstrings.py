"""Shows the doctests of docstrings as code on the site: an extension of griffe.

Docstrings have a section "Example:" for each doctest. griffe reads doctests only in a
section that is called "Examples:".
"""

import re
from typing import Any

import griffe


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            value = obj.docstring.value
            obj.docstring.value = re.sub(r"(?m)^Example:", "Examples:", value)
