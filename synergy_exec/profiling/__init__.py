"""Measures models' step times, input and restart costs on a testbed, with the workers that also train jobs."""
