"""All kinds of findings, each with its level, its effect and its remedy. ``findings`` decides which apply."""

from typing import Final

from ortserve.tools.report import FindingCatalog

_TEXTS: Final = """
# processors
no_avx2 (warning): without AVX2, ONNX Runtime's kernels use 128-bit instructions and are several times slower
    → use another type of machine; in a virtual machine, pass the host's processor through
no_int8_dot_product (advice): quantized models gain less; on x86 products of bytes may saturate and change results
    → compare with the original model here; if they differ, quantize it again with ortserve quantize --reduce-range on
cpu_quota (advice): libraries that count processors start too many threads, which use up the quota early in each period
    → use a whole number of processors, exclusive if possible (Kubernetes: equal CPU request and limit)
small_cpu_quota (warning): a single thread cannot run all the time: requests wait for the rest of a period of 100 ms
    → raise the quota to at least one processor
cpu_throttled (warning): each such period may add 100 ms to the requests that it interrupts
    → raise the quota, or lower instances and intra_op_threads
shared_cores (advice): a second thread on a core adds little to matrix products, so runs use one thread per core
    → measure whether more intra_op_threads help a model: ortserve tune
numa (advice): threads that read the memory of another node are slower
    → run one server per node: numactl --cpunodebind=N --membind=N ortserve serve ...
frequency_governor (advice): after a pause, processors are slow until they have been busy for a while
    → cpupower frequency-set -g performance

# steadiness
unsteady_processors (warning): latencies of requests vary at least as much, and benchmarks here need many repetitions
    → look for other work on this machine or its host; prefer exclusive processors
unequal_processors (warning): a run on several threads waits for the slowest one
    → keep the server on equal processors (taskset, cpuset), for example the performance cores
stolen_time (warning): requests wait without any sign of it inside this machine
    → use a type of machine without shared processors

# memory
memory_near_limit (warning): the kernel kills a process beyond the limit; cached files count, but are dropped first
    → raise the limit, or serve fewer models
processes_killed (warning): a killed server answers no request until it is started again
    → raise the memory limit; max_inflight_bytes and max_rows limit the memory that the server uses
huge_pages_defrag (warning): an allocation may wait for the kernel to move memory
    → echo madvise > /sys/kernel/mm/transparent_hugepage/defrag
no_huge_pages (advice): without huge pages, large weights need many entries in page tables
    → echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, and measure
small_shared_memory (advice): clients that pass tensors in shared memory have no room for large ones
    → docker run --shm-size=1g, or an emptyDir with medium: Memory; only needed with --allow-client-shm

# system
few_open_files (warning): connections beyond the limit fail although the options allow them
    → raise it (ulimit -Hn, LimitNOFILE= of systemd), or lower http_max_connections and grpc_max_connections
variables_without_effect (advice): ONNX Runtime has not used OpenMP since version 1.7, so they do not change its threads
    → unset them; use intra_op_threads and session.spinning
runtime_variables (warning): they change how ONNX Runtime works, and model.yaml does not show it
    → unset them; use options instead

# ONNX Runtime and GPUs
runtime_distributions (problem): ortserve serve refuses to start
    → run the commands above
provider_unusable (problem): models that request it fail to load, or run elsewhere with allow_fallback
    → pip install 'onnxruntime-gpu[cuda,cudnn]', for TensorRT also 'tensorrt-cu13<11'; see whether nvidia-smi works
provider_without_gpu (warning): models that request it fail to load, or run elsewhere with allow_fallback
    → give the container the GPU (docker run --gpus all); on a machine without one install ortserve[cpu]
missing_library (warning): operators that need it fail: convolutions need cuDNN, Fourier transforms need cuFFT
    → pip install 'onnxruntime-gpu[cuda,cudnn]'
gpu_unused (warning): models run on the CPU only
    → pip uninstall onnxruntime, then pip install 'ortserve[gpu]'
gpus_hidden (warning): execution providers on GPUs cannot be used
    → unset CUDA_VISIBLE_DEVICES
old_driver (problem): onnxruntime-gpu 1.31 needs a driver for CUDA 13.0
    → install driver 580 or later
unsupported_gpu (problem): onnxruntime-gpu 1.31 has kernels for 7.5, 8.0, 8.6, 8.9, 9.0 and 12.0 only
    → use another GPU, or build ONNX Runtime for this one
gpu_memory_in_use (warning): models that do not fit into the free memory fail to load
    → end the other processes (nvidia-smi), or set gpu_mem_limit

# options, keys and TLS
invalid_option (problem): ortserve serve refuses to start
    → correct the option
unknown_variable (warning): ortserve serve ignores it, and logs a warning
    → correct its name, or remove it
readable_secret (warning): every user of this machine can use it
    → chmod 600, owned by the user of the server
certificate_expires (warning): clients that verify it refuse to connect from then on
    → replace tls_cert_file and tls_key_file; the server follows the files without a restart
untrusted_certificate (warning): clients refuse to connect, or skip verification
    → give clients its authority (SSL_CERT_FILE), or the server a certificate for this name
open_control (warning): every client that reaches the port can load and unload models
    → set control_keys_file, or let only trusted hosts reach the port
open_shared_memory (warning): any caller can read and overwrite the objects in /dev/shm that the server may open
    → allow it on loopback addresses only, or set control_keys_file
plain_text (warning): inputs, outputs and keys can be read and changed on the way
    → set tls_cert_file and tls_key_file, or end TLS at a proxy on the same host

# models of a repository
empty_repository (problem): the server would serve nothing
    → expected <repository>/<model>/<version>/model.onnx or <repository>/<name>.onnx
model_fails (problem): the server does not serve it
    → correct what the message names
model_not_checked (warning): the check cannot tell whether the server can serve it
    → give it more memory, or more time by --seconds-per-model
provider_passed_over (warning): the model runs on a later execution provider of its list, which may be much slower
    → see the execution providers of this report, or remove it from execution_providers
option_without_effect (warning): the server serves the model as if the option were not set
    → keep it if that is right, or remove it, or the option that contradicts it
nodes_on_cpu (warning): each run copies tensors between the device and the host
    → ortserve inspect shows which nodes; the entry session.disable_cpu_ep_fallback makes them an error
not_batched (warning): concurrent requests wait for each other
    → ortserve inspect shows why; set batched: true only if rows are independent
batched_against_evidence (warning): answers may depend on the other requests of a batch
    → remove batched: true, or correct the model
load_warning (warning): the server logs it as a warning
    → correct the options that the message names
too_many_threads (warning): threads take processors from each other: runs take longer, and their times vary
    → keep instances times intra_op_threads within the processors
little_memory (warning): batches and requests need memory, too, and the kernel kills a process that takes too much
    → raise the memory limit, serve fewer models, or use session.shared_arena

# a running server
not_live (problem): it is shutting down or has lost a device; requests fail
    → see its log
not_ready (problem): load balancers send it no requests
    → wait for its initial load; its log names required models that failed
model_not_ready (warning): requests for it fail
    → see the server's log, or ortserve doctor REPOSITORY
open_files_near_limit (problem): further connections fail
    → raise the limit, or lower idle_timeout_s
saturated (warning): queues grow, and requests are rejected or late
    → add servers or instances
rejected_requests (warning): the callers of these requests got errors
    → see ortserve_rejected_requests_total by reason
event_loop_stalls (warning): no request was read or answered during these stalls
    → give the server a processor that others do not use; its log says what it was doing
run_timeouts (warning): the requests of these batches failed
    → see the log, and run_timeout_s
abandoned_runs (warning): each such run still holds a thread; its model was reloaded
    → see the log for the model
out_of_memory (warning): the server has formed smaller batches since then
    → see the log; set max_rows or serve fewer models
rows_depend (warning): requests for this model now run alone
    → set batched: false, or correct the model
"""

CATALOG: Final = FindingCatalog(_TEXTS)
finding: Final = CATALOG.finding
