"""Shared groundwork: errors, validation, files, random streams, signals."""
