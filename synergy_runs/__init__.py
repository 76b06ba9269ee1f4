"""What both drivers share: jobs in (traces, workloads, settings), facts out (logs, metrics, results, reports)."""
