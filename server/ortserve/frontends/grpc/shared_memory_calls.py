"""The shared memory calls of gRPC: a serialized message in, a message out."""

from collections.abc import Callable

from google.protobuf.message import Message

from ortserve._pb import shared_memory_pb2 as pb
from ortserve.codecs.grpc_infer import parse_message
from ortserve.service.shared_memory import SharedMemory


def shared_memory_calls(regions: SharedMemory) -> dict[str, Callable[[bytes], Message]]:
    """Return the calls by name; each answers at once, on the loop, or raises ServeError."""

    def system_status(data: bytes) -> Message:
        request = parse_message(pb.SystemSharedMemoryStatusRequest, data)
        response = pb.SystemSharedMemoryStatusResponse()
        for known in regions.status(request.name):
            entry = response.regions[known.name]
            entry.name, entry.key, entry.offset, entry.byte_size = known.name, known.key, known.offset, known.byte_size
        return response

    def register_system(data: bytes) -> Message:
        request = parse_message(pb.SystemSharedMemoryRegisterRequest, data)
        regions.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def unregister_system(data: bytes) -> Message:
        regions.unregister(parse_message(pb.SystemSharedMemoryUnregisterRequest, data).name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def cuda_status(data: bytes) -> Message:
        regions.cuda_status(parse_message(pb.CudaSharedMemoryStatusRequest, data).name)
        return pb.CudaSharedMemoryStatusResponse()

    def register_cuda(data: bytes) -> Message:
        regions.register_cuda(parse_message(pb.CudaSharedMemoryRegisterRequest, data).name)
        return pb.CudaSharedMemoryRegisterResponse()

    def unregister_cuda(data: bytes) -> Message:
        regions.unregister_cuda(parse_message(pb.CudaSharedMemoryUnregisterRequest, data).name)
        return pb.CudaSharedMemoryUnregisterResponse()

    return {
        "SystemSharedMemoryStatus": system_status,
        "SystemSharedMemoryRegister": register_system,
        "SystemSharedMemoryUnregister": unregister_system,
        "CudaSharedMemoryStatus": cuda_status,
        "CudaSharedMemoryRegister": register_cuda,
        "CudaSharedMemoryUnregister": unregister_cuda,
    }
