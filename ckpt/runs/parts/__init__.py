"""The objects of a log, each written once, and the larger ones that replace them."""
