"""Real training jobs under the same decisions: a controller, an agent per node, workers on torch.distributed."""
