"""One process per node: starts workers, watches them, passes on what they say."""
