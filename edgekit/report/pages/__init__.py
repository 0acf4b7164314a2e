"""HTML pages and the pictures in them."""
