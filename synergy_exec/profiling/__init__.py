"""What this testbed's models cost: every admitted plan measured by the workers that would train it."""
