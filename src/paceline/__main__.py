"""`python -m paceline`, the form that torchrun starts."""

from paceline.cli import command

command()
