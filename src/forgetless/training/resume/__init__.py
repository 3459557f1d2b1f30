"""Resume an interrupted run exactly where it stopped."""
