"""Operations on whole runs, which a kill in between leaves to be repeated: copies and deletions; and the trials of a sweep."""
