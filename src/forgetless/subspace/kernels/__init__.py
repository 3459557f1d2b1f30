"""Compiled projections away from stored rows."""
