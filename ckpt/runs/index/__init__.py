"""The contents of a run's manifests, many to an object."""
