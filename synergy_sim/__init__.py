"""A trace-driven discrete-event simulator of a GPU cluster, driving the decisions of `synergy_core`."""
