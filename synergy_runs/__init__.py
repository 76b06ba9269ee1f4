"""Code that simulator and executor share: inputs (traces, workloads, settings) and outputs (logs, metrics, reports)."""
