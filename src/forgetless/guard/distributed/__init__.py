"""Guarded models that several processes train together."""
