"""Jobs that ship with Synergy, on data made on the spot."""
