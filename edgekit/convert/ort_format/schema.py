"""The tables of the ORT format, version 5 and 6: what each slot holds, and which lists have no order.

From ORT's `onnxruntime/core/flatbuffers/schema/ort.fbs`. A list with a `key` is a map on loading, so its order is free;
any other order is meaning.
"""

import msgspec


class Field(msgspec.Struct, frozen=True):
    """A slot of a table.

    `kind` is "string", "table", "union", "blob", "deprecated", or the struct code of a number; a kind in brackets is
    a vector of it. `of` names the table. `key` holds the paths to what a list is sorted by.
    """

    name: str
    kind: str
    of: str = ""
    key: tuple[str, ...] = ()


NUMBER_SIZES = {"b": 1, "B": 1, "?": 1, "i": 4, "I": 4, "f": 4, "q": 8, "edge": 12}
"""Bytes of each number kind; `edge` is the struct EdgeEnd (node index, source slot, destination slot)."""

UNIONS = {"TypeInfoValue": {1: "TensorTypeAndShape", 2: "SequenceType", 3: "MapType"}}
"""Which table a union holds, by the number in the slot before it."""

ROOT = "InferenceSession"

SCHEMA: dict[str, tuple[Field, ...]] = {
    "InferenceSession": (
        Field("ort_version", "string"),
        Field("model", "table", "Model"),
        Field("session_state", "deprecated"),
        Field("kernel_type_str_resolver", "table", "KernelTypeStrResolver"),
    ),
    "Model": (
        Field("ir_version", "q"),
        Field("opset_import", "[table]", "OperatorSetId", ("domain", "version")),
        Field("producer_name", "string"),
        Field("producer_version", "string"),
        Field("domain", "string"),
        Field("model_version", "q"),
        Field("doc_string", "string"),
        Field("graph", "table", "Graph"),
        Field("graph_doc_string", "string"),
        Field("metadata_props", "[table]", "StringStringEntry", ("key",)),
    ),
    "OperatorSetId": (Field("domain", "string"), Field("version", "q")),
    "StringStringEntry": (Field("key", "string"), Field("value", "string")),
    "Graph": (
        Field("initializers", "[table]", "Tensor", ("name",)),
        Field("node_args", "[table]", "ValueInfo", ("name",)),
        Field("nodes", "[table]", "Node", ("index",)),
        Field("max_node_index", "I"),
        Field("node_edges", "[table]", "NodeEdge", ("node_index",)),
        Field("inputs", "[string]"),
        Field("outputs", "[string]"),
        Field("sparse_initializers", "[table]", "SparseTensor", ("values.name",)),
        Field("runtime_optimizations", "table", "RuntimeOptimizations"),
    ),
    "Node": (
        Field("name", "string"),
        Field("doc_string", "string"),
        Field("domain", "string"),
        Field("since_version", "i"),
        Field("index", "I"),
        Field("op_type", "string"),
        Field("type", "i"),
        Field("execution_provider_type", "string"),
        Field("inputs", "[string]"),
        Field("outputs", "[string]"),
        Field("attributes", "[table]", "Attribute", ("name",)),
        Field("input_arg_counts", "[i]"),
        Field("implicit_inputs", "[string]"),
    ),
    "NodeEdge": (Field("node_index", "I"), Field("input_edges", "[edge]"), Field("output_edges", "[edge]")),
    "Attribute": (
        Field("name", "string"),
        Field("doc_string", "string"),
        Field("type", "i"),
        Field("f", "f"),
        Field("i", "q"),
        Field("s", "string"),
        Field("t", "table", "Tensor"),
        Field("g", "table", "Graph"),
        Field("floats", "[f]"),
        Field("ints", "[q]"),
        Field("strings", "[string]"),
        Field("tensors", "[table]", "Tensor"),
        Field("graphs", "[table]", "Graph"),
    ),
    "Tensor": (
        Field("name", "string"),
        Field("doc_string", "string"),
        Field("dims", "[q]"),
        Field("data_type", "i"),
        Field("raw_data", "blob"),
        Field("string_data", "[string]"),
        Field("external_data_offset", "q"),
    ),
    "SparseTensor": (Field("values", "table", "Tensor"), Field("indices", "table", "Tensor"), Field("dims", "[q]")),
    "ValueInfo": (Field("name", "string"), Field("doc_string", "string"), Field("type", "table", "TypeInfo")),
    "TypeInfo": (Field("denotation", "string"), Field("value_type", "B"), Field("value", "union", "TypeInfoValue")),
    "TensorTypeAndShape": (Field("elem_type", "i"), Field("shape", "table", "Shape")),
    "SequenceType": (Field("elem_type", "table", "TypeInfo"),),
    "MapType": (Field("key_type", "i"), Field("value_type", "table", "TypeInfo")),
    "Shape": (Field("dim", "[table]", "Dimension"),),
    "Dimension": (Field("value", "table", "DimensionValue"), Field("denotation", "string")),
    "DimensionValue": (Field("dim_type", "b"), Field("dim_value", "q"), Field("dim_param", "string")),
    "RuntimeOptimizations": (Field("records", "[table]", "RecordContainerEntry", ("optimizer_name",)),),
    "RecordContainerEntry": (
        Field("optimizer_name", "string"),
        Field("runtime_optimization_records", "[table]", "Record"),
    ),
    "Record": (
        Field("action_id", "string"),
        Field("nodes_to_optimize_indices", "table", "NodesToOptimize"),
        Field("produced_nodes", "deprecated"),
        Field("produced_op_ids", "[string]"),
    ),
    "NodesToOptimize": (
        Field("node_indices", "[I]"),
        Field("num_inputs", "I"),
        Field("num_outputs", "I"),
        Field("has_variadic_input", "?"),
        Field("has_variadic_output", "?"),
        Field("num_variadic_inputs", "I"),
        Field("num_variadic_outputs", "I"),
    ),
    "KernelTypeStrResolver": (Field("op_kernel_type_str_args", "[table]", "OpKernelTypes", ("op_id",)),),
    "OpKernelTypes": (
        Field("op_id", "string"),
        Field("kernel_type_str_args", "[table]", "KernelTypeArgs", ("kernel_type_str",)),
    ),
    "KernelTypeArgs": (Field("kernel_type_str", "string"), Field("args", "[table]", "ArgTypeAndIndex")),
    "ArgTypeAndIndex": (Field("arg_type", "b"), Field("index", "I")),
}
"""Every table, by its slots in order."""
