"""What quantizing needs to know of a float graph."""
