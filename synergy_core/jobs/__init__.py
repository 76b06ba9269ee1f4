"""A job's forms: what was submitted (`spec`), the scheduler's record of it (`record`), what is believed of it (a task:
`fitted`, `planned`, `profiled`), and what was decided (`decision`).
"""
