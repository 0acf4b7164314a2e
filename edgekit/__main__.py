"""`python -m edgekit` is the command line."""

from edgekit.cli.main import main

main()
