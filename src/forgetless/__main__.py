"""`python -m forgetless` is the command `forgetless`."""

from forgetless.cli import main

main()
