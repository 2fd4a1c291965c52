"""The objects of a state: what tensors and values they hold, under which names, and what of them is this rank's part."""
