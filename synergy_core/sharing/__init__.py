"""Mechanisms put to work: CPUs and memory shared out among jobs in an order (`synergy_core.mechanisms`)."""
