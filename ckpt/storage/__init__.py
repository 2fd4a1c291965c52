"""Objects under keys, on a disk, in a bucket or on a server; it knows no checkpoint."""
