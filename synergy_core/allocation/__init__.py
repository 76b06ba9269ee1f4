"""Allocation policies put to work: what they see (`snapshot`), who stops and who starts where (`carry_out`)."""
