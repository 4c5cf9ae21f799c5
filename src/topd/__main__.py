"""`python -m topd` is the `topd` command."""

from topd.cli import command

command()
