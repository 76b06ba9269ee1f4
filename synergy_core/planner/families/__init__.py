"""Model families: one module each; being in the folder registers it.

A module has a frozen dataclass `Architecture` (what `catalog/architectures/*.yaml` of that family fill) whose numbers
may also be arrays (plans,), one model per plan, and `work(architecture, plans, software) -> Work`.
"""
