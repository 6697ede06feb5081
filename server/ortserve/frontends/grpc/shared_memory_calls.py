"""The calls about regions of shared memory."""

from google.protobuf.message import Message

from ortserve._pb import shared_memory_pb2 as pb
from ortserve.codecs.grpc_infer import parse_message
from ortserve.frontends.grpc.calls import SERVICE_NAME, Handlers, answering, awaiting
from ortserve.service.shared_memory import SharedMemory


class SharedMemoryCalls:
    """Registers regions, forgets them and tells of them."""

    service = SERVICE_NAME

    def __init__(self, regions: SharedMemory) -> None:
        self._regions = regions

    def handlers(self) -> Handlers:
        return {
            "SystemSharedMemoryStatus": answering(self._system_status),
            "SystemSharedMemoryRegister": answering(self._register_system),
            "SystemSharedMemoryUnregister": answering(self._unregister_system),
            "CudaSharedMemoryStatus": answering(self._cuda_status),
            "CudaSharedMemoryRegister": awaiting(self._register_cuda),
            "CudaSharedMemoryUnregister": answering(self._unregister_cuda),
        }

    def _system_status(self, data: bytes) -> Message:
        request = parse_message(pb.SystemSharedMemoryStatusRequest, data)
        response = pb.SystemSharedMemoryStatusResponse()
        for known in self._regions.status(request.name):
            entry = response.regions[known.name]
            entry.name, entry.key, entry.offset, entry.byte_size = known.name, known.key, known.offset, known.byte_size
        return response

    def _register_system(self, data: bytes) -> Message:
        request = parse_message(pb.SystemSharedMemoryRegisterRequest, data)
        self._regions.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def _unregister_system(self, data: bytes) -> Message:
        self._regions.unregister(parse_message(pb.SystemSharedMemoryUnregisterRequest, data).name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def _cuda_status(self, data: bytes) -> Message:
        request = parse_message(pb.CudaSharedMemoryStatusRequest, data)
        response = pb.CudaSharedMemoryStatusResponse()
        for known in self._regions.cuda_status(request.name):
            entry = response.regions[known.name]
            entry.name, entry.device_id, entry.byte_size = known.name, known.device_id, known.byte_size
        return response

    async def _register_cuda(self, data: bytes) -> Message:
        request = parse_message(pb.CudaSharedMemoryRegisterRequest, data)
        await self._regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    def _unregister_cuda(self, data: bytes) -> Message:
        self._regions.unregister_cuda(parse_message(pb.CudaSharedMemoryUnregisterRequest, data).name)
        return pb.CudaSharedMemoryUnregisterResponse()
