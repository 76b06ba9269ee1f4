"""The decisions: what should run where. Knows no clock, no file but its catalog, no simulator and no device."""
