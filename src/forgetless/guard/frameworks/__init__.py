"""The guard in frameworks that own the training loop; each needs the extra of its name."""
