"""Trains a job under any admitted plan. It builds on torch alone and needs no worker, agent or controller."""
