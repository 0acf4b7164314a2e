"""HTML pages and their charts."""
