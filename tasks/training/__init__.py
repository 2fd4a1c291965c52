"""Leading the attempts of a training: start, records, retention, restarts."""
