"""The command `forgetless`."""

from forgetless.cli.entry import main

__all__ = ["main"]
