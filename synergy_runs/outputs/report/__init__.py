"""Makes figures, `report.html` and traces for Perfetto from run folders."""
