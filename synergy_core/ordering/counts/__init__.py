"""The queue where GPU counts alone decide what fits: a decision costs O(log n)."""
