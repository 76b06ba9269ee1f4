"""What people type and hand over by mistake, as data: a module for each kind, `CASES` in each."""
