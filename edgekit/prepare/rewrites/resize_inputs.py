"""Resize without empty tensors: exporters write them where an optional input is left out, and XNNPACK aborts on them.

See onnxruntime issues 32298 and 23826.
"""

import onnx

FIX_ID = "resize-empty-inputs"
_ROI, _SCALES = 1, 2


def leave_out_empty_inputs(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Gives no name to the empty `roi` and `scales` of each Resize, in place, and returns the names of the nodes.

    Both are optional from opset 13 on.
    """
    if opset < 13:
        return ()
    empty = {tensor.name for tensor in graph.initializer if list(tensor.dims) == [0]}
    changed: list[str] = []
    for node in graph.node:
        if node.op_type != "Resize" or node.domain:
            continue
        found = [at for at in (_ROI, _SCALES) if at < len(node.input) and node.input[at] in empty]
        for at in found:
            node.input[at] = ""
        if found:
            changed.append(node.name)
    return tuple(changed)
