"""A job's forms: what was submitted (`spec`), the scheduler's record (`record`), the scheduler's beliefs (a task:
`fitted`, `planned`), and what policies see (`state`).
"""
