"""A trace-driven discrete-event simulator of a GPU cluster. The schedulers of `synergy_core` decide in it."""
