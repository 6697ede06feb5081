// A CUDA runtime (libcudart) on host memory, for ONNX Runtime's own CUDA provider on a machine without a GPU.
//
// Memory, copies, streams, events and graphs are there, with what CUDA promises and nothing more: work that is enqueued
// happens when somebody waits for it (HOST_CUDA_PACE=late), at any time that the events allow (any), or at once. Kernels
// do nothing, so that models are right whose nodes copy, and those of cuBLAS that cublas.cpp computes.
//
// While a stream captures, what would break a capture in CUDA's global mode breaks it here, in whichever thread: that is
// cudaStreamCaptureModeGlobal. An address outside of all memory loses the device, as CUDA's sticky errors do.
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace {

using Work = std::function<void()>;

struct Recorded {
    std::vector<Work> work;
};

struct Stream {
    int device = 0;
    std::deque<Work> queue;
    size_t enqueued = 0, done = 0;
    std::shared_ptr<Recorded> recording;  // while it captures
    bool is_broken = false;               // its capture
};
using StreamPtr = std::shared_ptr<Stream>;

struct Event {
    int device = 0;
    StreamPtr stream;
    size_t position = 0;
    std::chrono::steady_clock::time_point happened;
};

struct Block {
    size_t size;
    int device;
    int file;
};

std::recursive_mutex lock;
std::map<Stream *, StreamPtr> streams;
std::map<Event *, std::shared_ptr<Event>> events;
std::map<void *, std::shared_ptr<Recorded>> graphs;
std::map<char *, Block> memory;
std::map<char *, size_t> pinned;
std::map<std::string, long> calls;
std::map<int, long> copied;  // bytes, by kind
std::map<int, cudaError_t> lost;
StreamPtr legacy = std::make_shared<Stream>();
int captures = 0, captures_to_break = 0;
thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;
std::mt19937 drawn(7);

int device_count() {
    const char *text = getenv("HOST_CUDA_DEVICES");
    return text ? atoi(text) : 1;
}
size_t device_bytes() { return size_t(4) << 30; }
std::string pace() {
    const char *text = getenv("HOST_CUDA_PACE");
    return text ? text : "late";
}

cudaError_t store_error(cudaError_t error) {
    if (error != cudaSuccess) last = error;
    return error;
}
// Each call begins here: it is counted, and fails where the device is lost.
#define CALL(name)                                     \
    std::lock_guard<std::recursive_mutex> guard(lock); \
    calls[name]++;                                     \
    if (lost.count(current)) return store_error(lost[current])
// Breaks every capture that is going on, and fails then.
#define BREAKS_CAPTURES \
    if (captures) return store_error(break_captures())

cudaError_t break_captures() {
    for (auto &one : streams)
        if (one.second->recording) one.second->is_broken = true;
    return cudaErrorStreamCaptureUnsupported;
}

StreamPtr stream_of(cudaStream_t handle) {
    if (!handle || handle == cudaStreamLegacy || handle == cudaStreamPerThread) return legacy;
    auto found = streams.find(reinterpret_cast<Stream *>(handle));
    return found == streams.end() ? nullptr : found->second;
}

void carry_out(const StreamPtr &stream, size_t position) {
    while (stream->done < position) {
        Work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        stream->done++;
        work();
    }
}
void finish(const StreamPtr &stream) { carry_out(stream, stream->enqueued); }
void finish_all() {
    finish(legacy);
    for (auto &one : streams) finish(one.second);
}

cudaError_t enqueue(cudaStream_t handle, Work work) {
    StreamPtr stream = stream_of(handle);
    if (!stream) return store_error(cudaErrorInvalidResourceHandle);
    if (stream->recording) {
        if (captures_to_break > 0) {
            captures_to_break--;
            return store_error(break_captures());
        }
        stream->recording->work.push_back(std::move(work));
        return cudaSuccess;
    }
    if (stream == legacy) BREAKS_CAPTURES;
    stream->queue.push_back(std::move(work));
    stream->enqueued++;
    if (pace() == "at_once" || stream == legacy) {
        finish(stream);
    } else if (pace() == "any" && !streams.empty()) {
        auto chosen = streams.begin();
        std::advance(chosen, drawn() % streams.size());
        StreamPtr other = chosen->second;
        carry_out(other, other->done + drawn() % (other->enqueued - other->done + 1));
    }
    return cudaSuccess;
}

// The block that an address is in, or the end.
std::map<char *, Block>::iterator block_of(const void *address) {
    char *at = static_cast<char *>(const_cast<void *>(address));
    auto after = memory.upper_bound(at);
    if (after == memory.begin()) return memory.end();
    --after;
    return at < after->first + after->second.size ? after : memory.end();
}
bool is_on_device(const void *address, size_t size) {
    auto block = block_of(address);
    return block != memory.end() && static_cast<const char *>(address) + size <= block->first + block->second.size;
}
bool is_pinned(const void *address) {
    char *at = static_cast<char *>(const_cast<void *>(address));
    auto after = pinned.upper_bound(at);
    return after != pinned.begin() && at < std::prev(after)->first + std::prev(after)->second;
}

Work copy(void *target, const void *source, size_t size, cudaMemcpyKind kind, int device) {
    return [=] {
        if (!size) return;  // which CUDA allows with any addresses
        bool to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
        bool from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
        if ((to && !is_on_device(target, size)) || (from && !is_on_device(source, size))) {
            lost.emplace(device, cudaErrorIllegalAddress);
            return;
        }
        memmove(target, source, size);
        copied[kind] += static_cast<long>(size);
    };
}

cudaError_t copy_async(void *target, const void *source, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
    if (kind == cudaMemcpyDefault) {
        bool to = block_of(target) != memory.end(), from = block_of(source) != memory.end();
        kind = to ? (from ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)
                  : (from ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost);
    }
    StreamPtr own = stream_of(stream);
    if (!own) return store_error(cudaErrorInvalidResourceHandle);
    bool from_host = kind == cudaMemcpyHostToDevice, to_host = kind == cudaMemcpyDeviceToHost;
    if (own->recording && ((from_host && !is_pinned(source)) || (to_host && !is_pinned(target))))
        return store_error(break_captures());
    if (from_host && !is_pinned(source)) {  // pageable: it has been read once the call returns
        auto kept = std::make_shared<std::vector<char>>(static_cast<const char *>(source),
                                                        static_cast<const char *>(source) + size);
        int device = own->device;
        return enqueue(stream, [=] { copy(target, kept->data(), size, kind, device)(); });
    }
    cudaError_t error = enqueue(stream, copy(target, source, size, kind, own->device));
    if (!error && to_host && !is_pinned(target)) finish(own);  // pageable: it is there once the call returns
    return lost.count(own->device) ? store_error(lost[own->device]) : error;
}

cudaError_t allocate(void **address, size_t size) {
    size_t used = 0;
    for (auto &one : memory)
        if (one.second.device == current) used += one.second.size;
    if (used + size > device_bytes()) return store_error(cudaErrorMemoryAllocation);
    int file = memfd_create("host_cuda", 0);  // so that another process can open it
    size_t whole = size ? size : 1;
    if (file < 0 || ftruncate(file, static_cast<off_t>(whole))) return store_error(cudaErrorMemoryAllocation);
    void *made = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (made == MAP_FAILED) return store_error(cudaErrorMemoryAllocation);
    memory[static_cast<char *>(made)] = {whole, current, file};
    *address = made;
    return cudaSuccess;
}

cudaError_t give_back(void *address) {
    if (!address) return cudaSuccess;
    auto found = memory.find(static_cast<char *>(address));
    if (found == memory.end()) return store_error(cudaErrorInvalidValue);
    finish_all();
    munmap(address, found->second.size);
    close(found->second.file);
    memory.erase(found);
    return cudaSuccess;
}

}  // namespace

extern "C" {

// For tests: how often a function was called, and what is there of streams, events, graphs and memory.
long host_cuda_calls(const char *name) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    return calls[name];
}
long host_cuda_copied(int kind) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    return copied[kind];
}
long host_cuda_handles() {
    std::lock_guard<std::recursive_mutex> guard(lock);
    return static_cast<long>(streams.size() + events.size() + graphs.size() + pinned.size());
}
long host_cuda_bytes() {
    std::lock_guard<std::recursive_mutex> guard(lock);
    long bytes = 0;
    for (auto &one : memory) bytes += static_cast<long>(one.second.size);
    return bytes;
}
// The device of the calling thread fails from now on, as after a kernel that went astray.
void host_cuda_lose(int error) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    lost[current] = static_cast<cudaError_t>(error);
}
// So many captures from now on break at the first thing that is enqueued in them.
void host_cuda_break_captures(int number) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    captures_to_break = number;
}
// How many streams are capturing.
int host_cuda_captures() {
    std::lock_guard<std::recursive_mutex> guard(lock);
    return captures;
}
int host_cuda_range(unsigned long long address, unsigned long long *base, size_t *size) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    auto block = block_of(reinterpret_cast<void *>(address));
    if (block == memory.end()) return 1;
    *base = reinterpret_cast<unsigned long long>(block->first);
    *size = block->second.size;
    return 0;
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = device_count();
    return *count ? cudaSuccess : store_error(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return store_error(cudaErrorInvalidDevice);
    current = device;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
    *device = current;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof(*properties));
    snprintf(properties->name, sizeof(properties->name), "host memory in a GPU's place");
    properties->totalGlobalMem = device_bytes();
    properties->sharedMemPerBlock = properties->sharedMemPerBlockOptin = properties->sharedMemPerMultiprocessor = 96 << 10;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    for (int axis = 0; axis < 3; axis++) properties->maxThreadsDim[axis] = 1024, properties->maxGridSize[axis] = 65535;
    properties->major = 9;
    properties->multiProcessorCount = 4;
    properties->pciBusID = device + 1;
    properties->asyncEngineCount = 2;
    properties->unifiedAddressing = properties->concurrentKernels = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    std::map<int, int> values = {{cudaDevAttrMultiProcessorCount, 4},
                                 {cudaDevAttrMaxThreadsPerBlock, 1024},
                                 {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
                                 {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
                                 {cudaDevAttrMaxSharedMemoryPerBlockOptin, 96 << 10},
                                 {cudaDevAttrWarpSize, 32},
                                 {cudaDevAttrComputeCapabilityMajor, 9},
                                 {cudaDevAttrComputeCapabilityMinor, 0}};
    *value = values.count(attribute) ? values[attribute] : 0;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    CALL("cudaMemGetInfo");
    size_t used = 0;
    for (auto &one : memory)
        if (one.second.device == current) used += one.second.size;
    *total = device_bytes();
    *free_bytes = *total - used;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **address, size_t size) {
    CALL("cudaMalloc");
    BREAKS_CAPTURES;
    return allocate(address, size);
}
cudaError_t cudaFree(void *address) {
    CALL("cudaFree");
    BREAKS_CAPTURES;
    return give_back(address);
}
cudaError_t cudaHostAlloc(void **address, size_t size, unsigned) {
    CALL("cudaHostAlloc");
    BREAKS_CAPTURES;
    *address = aligned_alloc(64, (size / 64 + 1) * 64);
    pinned[static_cast<char *>(*address)] = size ? size : 1;
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **address, size_t size) { return cudaHostAlloc(address, size, 0); }
cudaError_t cudaFreeHost(void *address) {
    CALL("cudaFreeHost");
    BREAKS_CAPTURES;
    if (!address) return cudaSuccess;
    if (!pinned.erase(static_cast<char *>(address))) return store_error(cudaErrorInvalidValue);
    finish_all();
    free(address);
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address) {
    CALL("cudaPointerGetAttributes");
    memset(attributes, 0, sizeof(*attributes));
    auto block = block_of(address);
    if (block != memory.end()) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->device = block->second.device;
        attributes->devicePointer = const_cast<void *>(address);
    } else {
        attributes->type = is_pinned(address) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
        attributes->hostPointer = const_cast<void *>(address);
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t size, cudaMemcpyKind kind) {
    CALL("cudaMemcpy");
    BREAKS_CAPTURES;
    cudaError_t error = copy_async(target, source, size, kind, nullptr);
    finish(legacy);
    return error;
}
cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
    CALL("cudaMemcpyAsync");
    return copy_async(target, source, size, kind, stream);
}
cudaError_t cudaMemset(void *address, int value, size_t size) {
    CALL("cudaMemset");
    return enqueue(nullptr, [=] { memset(address, value, size); });
}
cudaError_t cudaMemsetAsync(void *address, int value, size_t size, cudaStream_t stream) {
    CALL("cudaMemsetAsync");
    return enqueue(stream, [=] { memset(address, value, size); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    CALL("cudaStreamCreateWithFlags");
    auto made = std::make_shared<Stream>();
    made->device = current;
    streams[made.get()] = made;
    *stream = reinterpret_cast<cudaStream_t>(made.get());
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    CALL("cudaStreamDestroy");
    StreamPtr own = stream_of(stream);
    if (!own || own == legacy) return store_error(cudaErrorInvalidResourceHandle);
    finish(own);
    streams.erase(own.get());
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    CALL("cudaStreamSynchronize");
    BREAKS_CAPTURES;
    StreamPtr own = stream_of(stream);
    if (!own) return store_error(cudaErrorInvalidResourceHandle);
    finish(own);
    return lost.count(current) ? store_error(lost[current]) : cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    CALL("cudaDeviceSynchronize");
    BREAKS_CAPTURES;
    finish_all();
    return lost.count(current) ? store_error(lost[current]) : cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    CALL("cudaStreamWaitEvent");
    auto found = events.find(reinterpret_cast<Event *>(event));
    if (found == events.end()) return store_error(cudaErrorInvalidResourceHandle);
    StreamPtr other = found->second->stream;
    size_t position = found->second->position;
    if (!other) return cudaSuccess;
    return enqueue(stream, [=] { carry_out(other, position); });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    CALL("cudaLaunchHostFunc");
    return enqueue(stream, [=] { function(data); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    CALL("cudaEventCreateWithFlags");
    auto made = std::make_shared<Event>();
    made->device = current;
    events[made.get()] = made;
    *event = reinterpret_cast<cudaEvent_t>(made.get());
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    CALL("cudaEventDestroy");
    return events.erase(reinterpret_cast<Event *>(event)) ? cudaSuccess : store_error(cudaErrorInvalidResourceHandle);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    CALL("cudaEventRecord");
    auto found = events.find(reinterpret_cast<Event *>(event));
    StreamPtr own = stream_of(stream);
    if (found == events.end() || !own) return store_error(cudaErrorInvalidResourceHandle);
    if (own != legacy && own->device != found->second->device) return store_error(cudaErrorInvalidResourceHandle);
    if (own->recording) return cudaSuccess;
    std::shared_ptr<Event> marked = found->second;
    marked->stream = own;
    marked->position = own->enqueued + 1;
    return enqueue(stream, [marked] { marked->happened = std::chrono::steady_clock::now(); });
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    CALL("cudaEventSynchronize");
    BREAKS_CAPTURES;
    auto found = events.find(reinterpret_cast<Event *>(event));
    if (found == events.end()) return store_error(cudaErrorInvalidResourceHandle);
    if (found->second->stream) carry_out(found->second->stream, found->second->position);
    return lost.count(current) ? store_error(lost[current]) : cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t second) {
    CALL("cudaEventElapsedTime");
    auto passed = reinterpret_cast<Event *>(second)->happened - reinterpret_cast<Event *>(first)->happened;
    *milliseconds = std::chrono::duration<float, std::milli>(passed).count();
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    CALL("cudaStreamBeginCapture");
    StreamPtr own = stream_of(stream);
    if (!own || own == legacy || own->recording) return store_error(cudaErrorStreamCaptureUnsupported);
    own->recording = std::make_shared<Recorded>();
    own->is_broken = false;
    captures++;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    CALL("cudaStreamEndCapture");
    StreamPtr own = stream_of(stream);
    *graph = nullptr;
    if (!own || !own->recording) return store_error(cudaErrorIllegalState);
    std::shared_ptr<Recorded> recorded = std::move(own->recording);
    captures--;
    if (own->is_broken) return store_error(cudaErrorStreamCaptureInvalidated);
    graphs[recorded.get()] = recorded;
    *graph = reinterpret_cast<cudaGraph_t>(recorded.get());
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    CALL("cudaStreamIsCapturing");
    StreamPtr own = stream_of(stream);
    *status = own && own->recording ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long) {
    CALL("cudaGraphInstantiate");
    auto found = graphs.find(graph);
    if (found == graphs.end()) return store_error(cudaErrorInvalidValue);
    auto made = std::make_shared<Recorded>(*found->second);
    graphs[made.get()] = made;
    *executable = reinterpret_cast<cudaGraphExec_t>(made.get());
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    CALL("cudaGraphLaunch");
    auto found = graphs.find(executable);
    if (found == graphs.end()) return store_error(cudaErrorInvalidValue);
    std::shared_ptr<Recorded> recorded = found->second;
    return enqueue(stream, [recorded] {
        for (auto &work : recorded->work) work();
    });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    CALL("cudaGraphDestroy");
    return graphs.erase(graph) ? cudaSuccess : store_error(cudaErrorInvalidValue);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    CALL("cudaGraphExecDestroy");
    return graphs.erase(executable) ? cudaSuccess : store_error(cudaErrorInvalidValue);
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *address) {
    CALL("cudaIpcGetMemHandle");
    auto found = memory.find(static_cast<char *>(address));
    if (found == memory.end()) return store_error(cudaErrorInvalidValue);
    memset(handle, 0, sizeof(*handle));
    snprintf(handle->reserved, sizeof(handle->reserved), "/proc/%d/fd/%d %zu", getpid(), found->second.file,
             found->second.size);
    return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void **address, cudaIpcMemHandle_t handle, unsigned) {
    CALL("cudaIpcOpenMemHandle");
    char path[64];
    size_t size = 0;
    handle.reserved[sizeof(handle.reserved) - 1] = 0;
    if (sscanf(handle.reserved, "%63s %zu", path, &size) != 2) return store_error(cudaErrorInvalidValue);
    FILE *file = fopen(path, "r+");
    if (!file) return store_error(cudaErrorInvalidValue);
    void *made = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    int kept = dup(fileno(file));
    fclose(file);
    if (made == MAP_FAILED) return store_error(cudaErrorMapBufferObjectFailed);
    memory[static_cast<char *>(made)] = {size, current, kept};
    *address = made;
    return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void *address) {
    CALL("cudaIpcCloseMemHandle");
    return give_back(address);
}

cudaError_t cudaGetLastError() {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError() { return last; }
const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
        case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
        case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
        case cudaErrorNotSupported: return "cudaErrorNotSupported";
        case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
        case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
        case cudaErrorIllegalState: return "cudaErrorIllegalState";
        default: return "cudaErrorUnknown";
    }
}
const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidResourceHandle: return "invalid resource handle";
        case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
        case cudaErrorLaunchFailure: return "unspecified launch failure";
        case cudaErrorNotSupported: return "operation not supported";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        case cudaErrorIllegalState: return "the operation cannot be performed in the present state";
        default: return "unknown error";
    }
}

// Kernels: enqueued, and nothing else. The stream must be of the thread's device.
static cudaError_t launch(cudaStream_t stream) {
    CALL("cudaLaunchKernel");
    StreamPtr own = stream_of(stream);
    if (!own || (own != legacy && own->device != current)) return store_error(cudaErrorInvalidResourceHandle);
    return enqueue(stream, [] {});
}
cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t stream) { return launch(stream); }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t stream) {
    return launch(stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t stream) {
    return launch(stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *, void **) { return launch(how->stream); }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
    memset(attributes, 0, sizeof(*attributes));
    attributes->maxThreadsPerBlock = 1024;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t, unsigned) {
    *blocks = 2;
    return cudaSuccess;
}
thread_local struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configured;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configured = {grid, block, shared, stream};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configured.grid;
    *block = configured.block;
    *shared = configured.shared;
    *static_cast<void **>(stream) = configured.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(function));
    return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *) {
    static void *handle[1];
    return handle;
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *) {}
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
}
