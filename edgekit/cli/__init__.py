"""The command line: each command turns its options into values, calls one public function, and prints the result."""
