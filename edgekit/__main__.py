"""`python -m edgekit` is the command line."""

import sys

# `python -m` looks for modules in the working folder first, and that may be a stranger's: a file `numpy.py` beside a
# model would run. Where edgekit itself lies there, its own modules are found through the package.
if not sys.flags.safe_path and sys.path:
    del sys.path[0]

from edgekit.cli.main import main

main()
