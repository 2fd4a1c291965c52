"""Tensors and values as a checkpoint; with the frameworks, the only importer of torch."""
