"""Steps that remove what a model does not need: constant and dead nodes, and weights that are there twice.

Libraries are imported by the process that needs them.
"""

import hashlib
from pathlib import Path
from typing import Final

import onnx
from onnx import GraphProto, ModelProto

from ortserve.tools.optimize.files import Made, contents, data_file, edit, nbytes_of_tensor, pack, save, save_ir

_LEFT_TO_RUNTIME: Final = ["FusionGemm", "FusionGemmMul", "FusionGemmAdd"]
"""Fusions of ``onnxslim`` that hide biases from ONNX Runtime's own fusions."""
_LEAST_SHARED_BYTES: Final = 1024
"""Smaller weights may stay twice."""


def fold(source: Path, target: Path) -> Made:
    """Fold constants and remove dead and duplicate nodes by ``onnxscript``'s optimizer, which knows no fusions."""
    import onnx_ir
    from onnxscript import optimizer

    model = onnx_ir.load(source)
    optimizer.optimize(model)
    save_ir(model, target, source)
    return Made((), ("onnxscript", "onnx_ir"))


def slim(source: Path, target: Path) -> Made:
    """The same by ``onnxslim``, which also merges shape computations and normalizations into convolutions."""
    import onnxslim

    model = onnxslim.slim(onnx.load(source), skip_fusion_patterns=_LEFT_TO_RUNTIME)
    save(model, target, source)
    return Made((), ("onnxslim",))


def share_weights(source: Path, target: Path) -> Made:
    """Keep equal weights once. They are compared by digests, one tensor at a time."""
    merged: list[int] = []

    def change(model: ModelProto) -> None:
        digests: dict[tuple[object, ...], str] = {}
        names: dict[str, str] = {}
        ends = {value.name for value in (*model.graph.input, *model.graph.output)}
        for tensor in model.graph.initializer:
            if (nbytes := nbytes_of_tensor(tensor)) >= _LEAST_SHARED_BYTES:
                digest = hashlib.sha256()
                for part in contents(tensor, source.parent):
                    digest.update(part)
                key = (tensor.data_type, tuple(tensor.dims), digest.digest())
                if digests.setdefault(key, tensor.name) != tensor.name and tensor.name not in ends:
                    names[tensor.name] = digests[key]
                    merged.append(nbytes)
        kept = [tensor for tensor in model.graph.initializer if tensor.name not in names]
        del model.graph.initializer[:]
        model.graph.initializer.extend(kept)
        _rename(model.graph, names)

    before = target.with_name("shared") / target.name
    before.parent.mkdir()
    edit(source, before, change)
    if data_file(before).exists():
        pack(before, target)  # without the data that nothing refers to any more
    else:
        before.rename(target)
    return Made((f"{len(merged)} weights that were there twice, {sum(merged):,} bytes",) if merged else ())


def _rename(graph: GraphProto, names: dict[str, str]) -> None:
    """Let nodes read other weights, also in inner graphs, whose own values have names of their own."""
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = names.get(name, name)
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                own = {tensor.name for tensor in inner.initializer} | {value.name for value in inner.input}
                _rename(inner, {name: other for name, other in names.items() if name not in own})
