"""Workers: each is one rank of one run, in a process forked from a parent that has only imported torch."""
