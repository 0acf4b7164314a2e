"""How fast a model runs, and how sure that is."""
