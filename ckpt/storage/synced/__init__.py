"""Directories of this machine that a command copies to where other machines reach them."""
