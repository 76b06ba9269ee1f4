"""Checks that a policy keeps the rules of all policies: on snapshots (`rules`), in whole runs (`conformance`)."""
