"""What changes a storage besides pins and prunes: copies of runs, and their deletion."""
