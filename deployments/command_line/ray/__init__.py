"""The command `migrate-check`: the names of Ray in a file, and their equivalents here."""
