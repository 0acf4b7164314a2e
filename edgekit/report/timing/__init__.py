"""Times for people: benchmarks and profiles as tables."""
