"""What quantization needs to know about a float graph."""
