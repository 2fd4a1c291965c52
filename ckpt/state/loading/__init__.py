"""The load of a stored state: the reads that it needs, the live objects that it restores, and the export to one file."""
