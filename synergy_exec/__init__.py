"""Trains real jobs under the simulator's decisions: a controller, agents on nodes, workers on torch.distributed."""
