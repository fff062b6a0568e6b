"""Compiles every shape of a plan before a job starts, as `jaxbucket precompile` does.

    python scripts/precompile_shapes.py --recipe package.module:function \
        --plan plan.json --cache DIR
"""

import sys

from jaxbucket.cli import main

if __name__ == "__main__":
    main(["precompile", *sys.argv[1:]], prog_name="precompile_shapes.py")
