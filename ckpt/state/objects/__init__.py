"""The objects of a state: the tensors and values that they hold, the names of these, and this rank's part of each."""
