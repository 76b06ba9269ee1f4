"""Measures step times, input and restart costs of models on a testbed, by the workers that would train them."""
