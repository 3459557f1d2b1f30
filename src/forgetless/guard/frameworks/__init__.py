"""The guard inside of frameworks that own the training loop; each needs the extra of its name."""
