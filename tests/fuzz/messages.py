"""Bad protobuf messages, derived from valid ones: any field, at any depth, with any value of its type.

The given generator determines each message; ``mutations`` creates bytes that are not protobuf.
"""

import random
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import service_pb2

from fuzz.mutations import HUGE, MODELS, WORDS


def good_infer() -> Any:
    """A good request for ``simple``."""
    request = service_pb2.ModelInferRequest(model_name="simple", id="1")
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        request.raw_input_contents.append(bytes(64))
    request.outputs.add(name="OUTPUT0")
    return request


def mutate(rng: random.Random, message: Any, depth: int = 0) -> None:
    """Change one to three fields of a message, at any depth."""
    for _ in range(rng.randrange(1, 4)):
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = rng.choice(fields)
        present = message.ListFields()
        if present and rng.random() < 0.6:
            field = rng.choice(present)[0]
        if rng.random() < 0.15:
            message.ClearField(field.name)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            _mutate_map(rng, getattr(message, field.name), field)
        elif field.is_repeated:
            _mutate_repeated(rng, getattr(message, field.name), field, depth)
        elif field.message_type is not None:
            if depth < 4:
                mutate(rng, getattr(message, field.name), depth + 1)
        else:
            setattr(message, field.name, _scalar(rng, field))


def _mutate_map(rng: random.Random, entries: Any, field: Any) -> None:
    key, value = field.message_type.fields
    for _ in range(rng.randrange(1, 3)):
        named = rng.choice(PARAMETERS) if key.type == FieldDescriptor.TYPE_STRING and rng.random() < 0.7 else None
        name = named or _scalar(rng, key)
        if value.message_type is not None:
            mutate(rng, entries[name], 3)
        else:
            entries[name] = _scalar(rng, value)


PARAMETERS: Final = (
    "priority", "timeout", "classification", "binary_data_size", "binary_data_output", "shared_memory_region",
    "shared_memory_offset", "shared_memory_byte_size", "sequence_id", "sequence_start", "sequence_end", "headers",
    "config", "triton_enable_empty_final_response", "file:1/model.onnx", "unload_dependents",
)  # fmt: skip


def _mutate_repeated(rng: random.Random, entries: Any, field: Any, depth: int) -> None:
    kind = rng.randrange(4)
    if kind == 0 and len(entries):
        del entries[rng.randrange(len(entries))]
    elif field.message_type is not None:
        if kind == 1 and len(entries):
            entries.add().CopyFrom(rng.choice(entries))
        else:
            mutate(rng, rng.choice(entries) if len(entries) and kind == 2 else entries.add(), depth + 1)
    else:
        for _ in range(rng.choice((1, 1, 2, 17, 300))):
            entries.append(_scalar(rng, field))


def _scalar(rng: random.Random, field: Any) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = rng.choice(WORDS + MODELS).replace("\ud800", "")
        return text if field.type == FieldDescriptor.TYPE_STRING else rng.randbytes(rng.choice((0, 1, 3, 64, 64, 1000)))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice((0.0, -0.0, 1.5, float("nan"), float("inf"), 1e30))
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    bits = 32 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
    is_signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)
    return max(low, min(high, rng.choice((0, 1, -1, 16, 2, *HUGE))))
