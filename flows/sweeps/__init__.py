"""The search of a sweep: its space, its suggestions, its decisions and their journal; starts no training."""
