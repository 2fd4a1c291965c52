"""The command `migrate-check`: names of Ray in a file, and what to write for them here."""
