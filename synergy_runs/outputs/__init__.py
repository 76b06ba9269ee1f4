"""What a run leaves behind: facts, metrics, stored results, comparisons, tables and the report."""
