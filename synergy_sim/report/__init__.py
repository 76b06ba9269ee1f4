"""Figures, the report, and a trace for Perfetto, made from run folders."""
