"""User batches: samples, loaders, outputs and losses."""
