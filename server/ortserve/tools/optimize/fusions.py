"""Steps that fuse, by the two libraries that know transformers. Each is imported by the process that needs it."""

from pathlib import Path
from typing import Final

from ortserve.tools.optimize.files import MOST_INLINE_BYTES, Made, data_file, nbytes_of, save_ir

TYPES: Final = (
    *("bart", "bert", "bert_keras", "bert_tf", "clip", "conformer", "gpt2", "gpt2_tf", "gpt_neox", "mmdit", "phi"),
    *("qwen3", "sam2", "swin", "t5", "tnlr", "unet", "vae", "vit"),
)
"""Of models, as ``onnxruntime.transformers`` knows them."""


def fuse_by_transformers(source: Path, target: Path, kind: str, heads: int, hidden: int) -> Made:
    """Fuse by ``onnxruntime.transformers``, which knows what PyTorch's TorchScript exporter writes."""
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    options = FusionOptions(kind)
    options.use_raw_attention_mask(True)  # the default keeps the number of ones only, as if padding were at the end
    made = optimize_model(str(source), kind, heads, hidden, optimization_options=options, opt_level=0)
    external = data_file(source).exists() or nbytes_of(source) > MOST_INLINE_BYTES
    made.save_model_to_file(str(target), use_external_data_format=external)
    sizes = f", {heads} heads, hidden size {hidden}" if heads else ""
    return Made((f"by onnxruntime.transformers (type {kind}{sizes})",), ("sympy",))


def fuse_by_onnxscript(source: Path, target: Path) -> Made:
    """Fuse by ``onnxscript``, which knows what PyTorch's newer exporter writes."""
    import onnx_ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model, _ = optimize_for_ort(onnx_ir.load(source))
    save_ir(model, target, source)
    return Made(("by onnxscript",), ("onnxscript", "onnx_ir"))
