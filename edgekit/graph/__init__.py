"""A read-only view of a model's graph, which every stage uses: `Graph`, `Node` and `Value` over the protobuf.

onnx-ir, the usual library for this, is slower here, because onnx's shape inference, its checker and ONNX Runtime's
quantizer take protobufs only (measured at 808c56d, equal with onnx-ir 0.2.1 and 1.1.0). For 5,000 nodes and 600 MB of
weights, a view takes 0.26 s of processor time and 0.3 GB, onnx-ir 1.8 s and 1.2 GB, and 0.3 s to write a protobuf; for
MobileNetV2 it is 0.024 s and 0.053 s. Importing onnx-ir takes half a second, and it changes a model's bytes: it adds a
value_info for each initializer.
"""
