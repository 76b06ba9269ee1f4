"""One rank of one run: a process forked from a parent that has only imported torch."""
