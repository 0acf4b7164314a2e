"""Check, quantize, convert, bundle and verify ONNX models for phones and boards."""
