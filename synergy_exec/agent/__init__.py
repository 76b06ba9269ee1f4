"""The agent is one process per node. It starts workers, watches them, and passes messages on to the controller."""
