"""Check: say node by node what a target will take, why not, and what to do."""
