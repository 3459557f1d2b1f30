"""Guards of models that several processes train together."""
