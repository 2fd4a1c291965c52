"""Copies and deletion of runs."""
