"""Identity and Dropout, which only hand their input on when a model runs."""

import onnx

from edgekit.prepare.rewrites.scene import Scene, view_scene

FIX_ID = "drop-copies"


def drop_copies(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:  # noqa: ARG001 - the signature of a fix
    """Removes each Identity, and each Dropout whose mask nothing reads, in place; returns the names of the nodes.

    One that makes an output of the graph stays, and so does one that a body reads, or that trains.
    """
    scene = view_scene(graph)
    dropped = [node for node in graph.node if _only_copies(scene, node)]
    source = {node.output[0]: node.input[0] for node in dropped}
    names = {node.name for node in dropped}
    kept = [node for node in graph.node if node.name not in names]
    for node in kept:
        for at, name in enumerate(node.input):
            while name in source:
                name = source[name]  # noqa: PLW2901 - follows a chain of copies
            node.input[at] = name
    if dropped:
        del graph.node[:]
        graph.node.extend(kept)
    return tuple(sorted(names))


def _only_copies(scene: Scene, node: onnx.NodeProto) -> bool:
    if node.domain or node.op_type not in {"Identity", "Dropout"} or not node.input or not node.output:
        return False
    if not node.input[0] or not node.output[0]:
        return False
    hidden = scene.outputs | scene.captured
    if node.output[0] in hidden or any(name in scene.readers or name in hidden for name in node.output[1:] if name):
        return False
    trains = len(node.input) > 2 and node.input[2] and scene.array(node.input[2]) is None
    return not trains and not (len(node.input) > 2 and node.input[2] and bool(scene.array(node.input[2])))
