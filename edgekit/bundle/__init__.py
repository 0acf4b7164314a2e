"""Bundle: everything an app needs of a model on a target, with the proof of what it is."""
