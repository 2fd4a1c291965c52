"""Any filesystem of fsspec as a storage."""
