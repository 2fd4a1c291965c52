"""Conversion of a path, a URL or a block to the specification of a storage; opens nothing."""
