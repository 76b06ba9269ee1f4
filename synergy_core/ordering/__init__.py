"""Ordering policies put to work.

Three kinds of queue make the same decision: `counts`, where GPU counts decide what fits, `nodes`, where a job's GPUs
must lie together, and `trial`, the long way, for everything else.
"""
