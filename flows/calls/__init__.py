"""Additions of this package to the call of a Prefect flow: refusals, short errors and logs, clusters by task runners."""
