"""Products and sums in the form that most providers take: Gemm, MatMul, Neg and Sum."""

from typing import Any

from edgekit.graph.rewrite import Writer, node_rewrite

_PLAIN = {"transA": 0, "transB": 0, "alpha": 1.0, "beta": 1.0}


@node_rewrite("gemm-to-matmul", {"Gemm"}, since=7)
def gemm_to_matmul(writer: Writer) -> None:
    """Rewrites Reshape([1, M, K] to [M, K]), Gemm with a constant [K, N] to MatMul, Add, Reshape to [M, N].

    Each result is the same sum of products. This undoes ONNX Runtime's MatMulAddFusion.
    """
    graph, node = writer.graph, writer.node
    source = graph.producers.get(node.input[0])
    if source is None or source.op_type != "Reshape" or node.input[1] not in graph.constants:
        return
    stack, rows = graph.value(source.input[0]).static_shape, graph.value(node.input[0]).static_shape
    given = {name: node.attributes.get(name, default) for name, default in _PLAIN.items()}
    if stack is None or rows is None or stack != (1, *rows) or given != _PLAIN:
        return
    columns = graph.constants[node.input[1]].dims[1]
    bias = graph.constants.get(node.input[2]) if node.has_input(2) else None
    if node.has_input(2) and (bias is None or list(bias.dims) != [columns]):
        return
    shape = writer.constant("shape", [rows[0], columns], "int64")
    made = writer.add("MatMul", [source.input[0], node.input[1]], "product")
    if bias is not None:
        made = writer.add("Add", [made, node.input[2]], "sum")
    writer.add("Reshape", [made, shape])


@node_rewrite(
    "plain-gemm",
    {"Gemm"},
    "put alpha, beta and transA of {count} of Gemm into nodes of their own",
    since=7,
    floats=True,
)
def plain_gemm(writer: Writer) -> None:
    """Rewrites Gemm(A, B, C) with alpha, beta or transA to Gemm(alpha * Transpose(A), B, beta * C).

    The factor alpha moves from the product to A, so the last bits may differ (1e-6 relative). transB stays.
    """
    node = writer.node
    alpha, beta = (float(node.attributes.get(name, 1.0)) for name in ("alpha", "beta"))
    turned, biased = bool(node.attributes.get("transA", 0)), node.has_input(2)
    if not turned and alpha == 1 and (beta == 1 or not biased):
        return
    left, bias = node.input[0], list(node.input[2:3])
    if turned:
        left = writer.add("Transpose", [left], "transposed", perm=[1, 0])
    if alpha != 1:
        left = writer.add("Mul", [left, writer.constant("alpha", alpha)], "scaled")
    if biased and beta != 1:
        value = writer.graph.array(node.input[2])
        if value is not None:
            bias = [writer.constant("bias", value * value.dtype.type(beta))]
        else:
            bias = [writer.add("Mul", [node.input[2], writer.constant("beta", beta)], "bias")]
    kept: dict[str, Any] = {"transB": 1} if node.attributes.get("transB", 0) else {}
    writer.add("Gemm", [left, node.input[1], *bias], **kept)


@node_rewrite(
    "matmul-to-2d", {"MatMul"}, "give {count} of MatMul two dimensions, between Reshapes", since=5, floats=True
)
def matmul_to_2d(writer: Writer) -> None:
    """Rewrites [..., M, K] @ constant [K, N] to Reshape to [-1, K], MatMul, and Reshape to [..., M, N].

    Each result is the same sum of products; the order of summation may differ (1e-6 relative).
    """
    graph, node = writer.graph, writer.node
    data, matrix = (graph.value(name).static_shape for name in node.input)
    if node.input[1] not in graph.constants or data is None or matrix is None:
        return
    if len(data) >= 3 and len(matrix) == 2:
        flat = writer.constant("flat", [-1, data[-1]], "int64")
        whole = writer.constant("whole", [*data[:-1], matrix[1]], "int64")
        product = writer.add("MatMul", [writer.add("Reshape", [node.input[0], flat], "rows"), node.input[1]], "product")
        writer.add("Reshape", [product, whole])


@node_rewrite("neg-to-mul", {"Neg"}, "write {count} of Neg as a product with -1, which is the same", floats=True)
def neg_to_mul(writer: Writer) -> None:
    """Rewrites Neg(x) of floats to x * -1."""
    writer.add("Mul", [writer.node.input[0], writer.constant("minus_one", -1)])


@node_rewrite("sum-to-add", {"Sum"}, "write {count} of Sum as Add, which is the same", since=7)
def sum_to_add(writer: Writer) -> None:
    """Rewrites Sum(a, b, c) to Add(Add(a, b), c)."""
    total, *rest = writer.node.input
    for index, name in enumerate(rest, start=1):
        total = writer.add("Add", [total, name], f"add_{index}" if index < len(rest) else "")
