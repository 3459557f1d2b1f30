"""Train a network on a sequence of tasks with a method against forgetting."""
