"""A checkpoint's files on this machine."""
