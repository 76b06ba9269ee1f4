"""The objects that describe a job: what its user submitted (`spec`), the scheduler's record (`record`) and beliefs (a
task: `fitted`, `planned`), and what policies see (`state`).
"""
