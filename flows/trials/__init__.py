"""The trials of a sweep, run: in its process, or as flow runs of a deployment."""
