"""Gradient compression: how replicas exchange gradients in fewer bytes; see docs/compression.md."""
