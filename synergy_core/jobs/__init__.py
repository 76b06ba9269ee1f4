"""The forms of a job: what its user submitted (`spec`), the scheduler's record of it (`record`), the scheduler's
beliefs about it (a task: `fitted`, `planned`), and what policies see of it (`state`).
"""
