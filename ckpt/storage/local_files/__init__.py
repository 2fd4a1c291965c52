"""Files of the local filesystem: safe paths, copies past the page cache, and many files made durable by one sync."""
