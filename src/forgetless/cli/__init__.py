"""The command `forgetless`."""

from forgetless.cli.main import main

__all__ = ["main"]
