"""Training with PyTorch for experiments. Importing `launch` does not import PyTorch; the other modules do."""
