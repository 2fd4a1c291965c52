"""Records: dataclasses by the types of their fields, and small ones at any key of a storage."""
