"""Objects in the buckets of S3, Google Cloud Storage and Azure; this package alone imports obstore."""
