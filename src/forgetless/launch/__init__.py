"""From a configuration to finished runs, on one machine or many."""
