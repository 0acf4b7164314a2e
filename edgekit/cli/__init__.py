"""The command line: each command builds values, calls one public function, shows the result."""
