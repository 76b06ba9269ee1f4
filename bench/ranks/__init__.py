"""Training with PyTorch for experiments, most of it on two ranks; the modules in experiments/ import it when needed."""
