"""What a call of a flow of this package adds to one of Prefect's: refusals, short errors and logs, clusters by task runners."""
