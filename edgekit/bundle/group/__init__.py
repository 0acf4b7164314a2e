"""Several graphs that belong together: what feeds what, their one folder, and the weights that they share."""
