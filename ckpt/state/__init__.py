"""Tensors and values as a checkpoint; only this package and the frameworks import torch."""
