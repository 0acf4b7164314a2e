"""Weight-only conversion: fp16, dynamic INT8, and 8 or 4 bits in blocks."""
