"""The metrics named ``ortserve_…``: name, type, labels and description. ``metrics`` exposes them."""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ortserve.core.timing import PHASES

Labels: TypeAlias = tuple[str, ...]
Tags: TypeAlias = tuple[tuple[str, str], ...]
"""Labels that the configuration of a model adds: names and values."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """A metric as Prometheus and the reference page show it. ``buckets`` are upper bounds in the metric's unit."""

    name: str
    type: Literal["histogram", "gauge", "counter"]
    labels: Labels
    help: str
    buckets: tuple[float, ...] = ()


def gauge(name: str, labels: Labels, description: str) -> Declaration:
    """Declare a value that rises and falls."""
    return Declaration(name, "gauge", labels, description)


def counter(name: str, labels: Labels, description: str) -> Declaration:
    """Declare a number that only grows."""
    return Declaration(name, "counter", labels, description)


_FROM_100_US: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)

REQUEST_DURATION: Final = Declaration(
    "ortserve_request_duration_seconds",
    "histogram",
    ("model", "version", "protocol", "outcome"),
    "Time from the complete body of a request until its answer is handed to the transport. outcome is ok or the kind "
    "of error. model and version are empty if the request could not be decoded or named no served model. protocol is "
    "http, grpc, or ensemble for a step of an ensemble.",
    _FROM_100_US,
)
PHASE_DURATION: Final = Declaration(
    "ortserve_request_phase_duration_seconds",
    "histogram",
    ("model", "version", "phase"),
    f"Time of answered requests in each phase: {', '.join(PHASES)}. The phases are consecutive; their sum is the "
    "request duration.",
    (0.00001, 0.000025, 0.00005, *_FROM_100_US),
)
BATCH_ROWS: Final = Declaration(
    "ortserve_batch_rows",
    "histogram",
    ("model", "version"),
    "Rows per batch.",
    tuple(float(2**power) for power in range(11)),
)
QUEUE_ROWS: Final = gauge("ortserve_queue_rows", ("model", "version"), "Rows in the queue.")
SATURATION: Final = gauge(
    "ortserve_saturation",
    ("model", "version"),
    "Rows offered per second, including rejected rows, divided by the rows per second that the version's instances can "
    "compute in full batches without other load. Above 1 the version needs more servers. The rate is averaged over "
    "about 5 seconds; the time of a full batch is the learned time for the latest shape. For models on one device, add "
    "their values. The event loop's time per request is not included: for tiny models see "
    "ortserve_event_loop_cpu_seconds_total.",
)
BATCHING_DECISIONS: Final = counter(
    "ortserve_batching_decisions_total",
    ("model", "version", "decision"),
    "Decisions of the batcher, counted in batches, requests or rows. batches: batches that ran. inline: batches that "
    "ran on the event loop. inline_overruns: runs that took more than 2 ms of the event loop; the next runs use "
    "workers. retries: parts of failed batches that ran again. refused_full: requests rejected because the queue was "
    "full. refused_late: requests rejected because their deadline could not be met. dropped_late: queued requests "
    "evicted because they could no longer finish in time. left: queued requests that were cancelled. dropped_late and "
    "left count each piece of a large request; if one piece fails, the others are cancelled. delayed: batches that "
    "waited for queue_delay_s. closed_loop_waits: batches that waited for the next requests of callers that were just "
    "answered. wasted_rows: rows computed for requests that were cancelled meanwhile. padding_rows: computed rows that "
    "belong to no request. run_timeouts, abandoned: batches that were terminated, and those that did not end. "
    "out_of_memory: batches after which the maximum batch size was halved.",
)
CHECKED_REQUESTS: Final = counter(
    "ortserve_checked_requests_total",
    ("model", "version", "outcome"),
    "Requests that ran in a shared batch and again alone, by the result of the comparison. agreed: equal answers. "
    "differed: each request of the version now runs alone until the version is reloaded. not_deterministic: two runs "
    "alone differ. failed: the check failed. Only for models with row_checks.",
)
CACHE_REQUESTS: Final = counter(
    "ortserve_response_cache_requests_total",
    ("model", "version", "result"),
    "Requests of models with response_cache, and copies of them for a shadow. hit: answered with the outputs of an "
    "equal request, finished or still running. miss: the request ran.",
)
CACHE_SAVED: Final = counter(
    "ortserve_response_cache_saved_seconds_total",
    ("model", "version"),
    "Time of the runs that cache hits made unnecessary.",
)
CACHE_BYTES: Final = gauge(
    "ortserve_response_cache_bytes", (), "Memory that the response cache uses; at most cache_bytes."
)
CACHE_EVICTIONS: Final = counter(
    "ortserve_response_cache_evicted_entries_total",
    (),
    "Entries evicted from the response cache to make room for others.",
)
SEQUENCES: Final = gauge(
    "ortserve_sequences",
    ("model", "version", "state"),
    "Open sequences by state. active: the sequence has a slot. waiting: it waits for a slot.",
)
SEQUENCES_ENDED: Final = counter(
    "ortserve_ended_sequences_total",
    ("model", "version", "reason"),
    "Ended sequences by reason. ended: after their last request. expired: no request for max_idle_s. evicted: the "
    "state grew beyond max_state_bytes. cancelled: the caller cancelled a request before it ran. failed: the first "
    "request failed, or a request was dropped from the queue. timed_out: the wait for a slot exceeded the timeout of a "
    "request, or could not end because requests of ensembles waited for slots of each other. unloaded: the version was "
    "unloaded or replaced.",
)
SEQUENCE_STATE_BYTES: Final = gauge(
    "ortserve_sequence_state_bytes",
    ("model", "version"),
    "Memory of the states of all sequences; about max_state_bytes at most.",
)
BATCH_LATENCY: Final = gauge(
    "ortserve_batch_latency_seconds",
    ("model", "version", "rows"),
    "Predicted time of a batch, by its rows, for the latest shape.",
)
BATCH_LATENCY_ERROR: Final = gauge(
    "ortserve_batch_latency_error_seconds",
    ("model", "version"),
    "95th percentile of how much longer batches take than predicted.",
)
STAGED_ELEMENTS: Final = counter(
    "ortserve_staged_elements_total",
    ("model", "version"),
    "Elements of the inputs of batches, padding included. 0 for a model without pad and buckets.",
)
PADDED_ELEMENTS: Final = counter(
    "ortserve_padded_elements_total",
    ("model", "version"),
    "Staged elements that belong to no request: padding of axes (pad) and of rows (buckets).",
)
RECORDED_REQUESTS: Final = counter(
    "ortserve_recorded_requests_total",
    ("model", "version", "outcome"),
    "Requests selected for recording, by outcome. recorded: written to a file. dropped: too many waited for the disk. "
    "failed: not written, because the disk or record.max_bytes is full or the texts cannot be stored. Only for models "
    "with record.",
)
ROLLOUT: Final = gauge(
    "ortserve_rollout_active",
    ("model", "version", "mode"),
    "1 for each active rollout. version is its candidate; mode is shadow or canary.",
)
ROLLOUT_REQUESTS: Final = counter(
    "ortserve_rollout_requests_total",
    ("model", "version", "outcome"),
    "Requests of a rollout by their outcome on the candidate (version), since the rollout or the server started. "
    "answered: by the canary. failed: on the candidate; of a canary, stable answered instead. rejected: the canary was "
    "busy or not ready, and stable answered instead. agreed, disagreed: the shadow's outputs compared with those of "
    "stable. shed: not copied to the shadow, because the server had other work. Requests that fail on both versions "
    "are not counted.",
)
ROLLOUT_ERROR: Final = gauge(
    "ortserve_rollout_worst_error",
    ("model", "version", "measure"),
    "Largest error of the compared requests of a shadow rollout, by measure: max, relative, cosine or top1, as in "
    "ortserve compare.",
)
ROLLOUT_P99: Final = gauge(
    "ortserve_rollout_tail_seconds",
    ("model", "version", "side"),
    "99th percentile of the times of stable and candidate (side) during a rollout, with an error of at most 9 %. For a "
    "shadow, the times of the runs of compared requests; for a canary, the times in queue and run.",
)
REJECTED: Final = counter(
    "ortserve_rejected_requests_total",
    ("model", "reason"),
    "Requests rejected before any work was done for them, by kind of error. model is empty if the request named no "
    "served model, or if it was rejected before its body was complete, and for rejected connections.",
)
UNAUTHORIZED: Final = counter(
    "ortserve_unauthorized_requests_total",
    ("group", "reason"),
    "Requests rejected without a valid key, by group of calls and kind of error: unauthenticated or forbidden. No "
    "other metric counts them.",
)
LOADS: Final = counter(
    "ortserve_model_loads_total",
    ("model", "outcome"),
    "Finished loads of a model's versions, including reloads, by outcome: ok or failed.",
)
STORE_UP: Final = gauge(
    "ortserve_store_up",
    ("repository",),
    "1 if the last listing of a repository in a store succeeded, otherwise 0. Loaded models keep serving in any case. "
    "Present only with such a repository.",
)
STORE_FETCHED_BYTES: Final = counter(
    "ortserve_store_fetched_bytes_total", ("repository",), "Bytes fetched from a repository in a store."
)
STORE_FAILURES: Final = counter(
    "ortserve_store_failures_total",
    ("repository", "operation"),
    "Failures of a repository in a store, by operation. list: it could not be listed. model: the files of a model "
    "could not be fetched, or failed a check.",
)
STORE_CACHE_BYTES: Final = gauge(
    "ortserve_store_cache_bytes",
    (),
    "Size of the files in store_cache_dir, including those of other servers; at most store_cache_bytes.",
)
OVERDUE_BATCHES: Final = counter(
    "ortserve_overdue_batches_total",
    ("model", "outcome"),
    "Batches whose run exceeded its time limit. terminated: the run was asked to end. abandoned: the run did not end "
    "within run_grace_s, so its instance was abandoned and the version is reloaded.",
)
LOAD_DURATION: Final = gauge(
    "ortserve_model_load_seconds", ("model", "version"), "Time that loading a serving version took, including warm-up."
)
MODEL_MEMORY: Final = gauge(
    "ortserve_model_memory_bytes",
    ("model", "version", "kind"),
    "Host memory of a version that loads or serves. sessions: growth of the process's private memory while sessions "
    "were opened; runs: its growth by warm-up; mapped: pages of mapped weight files, which the budget does not count; "
    "expected: an estimate, instead of the others, until the load has ended.",
)
MEMORY_BUDGET: Final = gauge(
    "ortserve_memory_budget_bytes", (), "Value of the option memory_budget_bytes. Absent without a budget."
)
GPU_MEMORY_BUDGET: Final = gauge(
    "ortserve_gpu_memory_budget_bytes",
    (),
    "Value of the option gpu_memory_budget_bytes, which applies to each GPU. Absent without a budget.",
)
EVICTIONS: Final = counter(
    "ortserve_model_evictions_total",
    ("model",),
    "Evictions of a model to make room for another one under memory_budget_bytes or gpu_memory_budget_bytes.",
)
LOADS_REFUSED: Final = counter(
    "ortserve_refused_loads_total",
    ("reason",),
    "Loads rejected because a memory budget left no room. budget: the model does not fit, alone or beside models that "
    "cannot be evicted. stay: only models that were loaded a moment ago could be evicted. start: only models "
    "that get memory earlier at the start of the server could be evicted; requests load the model.",
)
DEMANDS: Final = counter(
    "ortserve_on_demand_requests_total",
    ("model", "outcome"),
    "Requests for models that were not in memory, by outcome. loaded: the model was loaded while the request waited. "
    "late: the load took longer than the request could wait. refused: too many other requests waited. failed: the load "
    "failed or found no room.",
)
DEMAND_WAIT: Final = counter(
    "ortserve_on_demand_wait_seconds_total", (), "Time that requests waited for models to be loaded."
)
MODEL_STATE: Final = gauge(
    "ortserve_model_state",
    ("model", "version", "state"),
    "1 for the current state of a model version, 0 for the other states. version is empty if no version of the model "
    "could be read.",
)
DEVICE_MEMORY: Final = gauge(
    "ortserve_device_memory_bytes",
    ("device", "kind"),
    "Memory of a device on which models have buffers. free: memory that no process uses. total: all memory.",
)
DEVICE_LEDGER: Final = gauge(
    "ortserve_device_ledger_bytes",
    ("device", "owner", "purpose"),
    "Device memory by the instance that owns it and by purpose. buffers: exact. graphs: decrease of free memory by "
    "graph captures. session: any other decrease of free memory, which is weights and workspace.",
)
DEVICE_PINNED: Final = gauge(
    "ortserve_device_pinned_bytes",
    ("device", "owner", "purpose"),
    "Host memory that is pinned for copies to and from a device, by the instance that owns it and by purpose. "
    "staging: where batches are gathered. answers: where outputs are copied to and read. The owner unloaded holds "
    "answers of unloaded models; the next load or unload frees those that are no longer read.",
)
DEVICE_UTILIZATION: Final = gauge(
    "ortserve_device_utilization",
    ("device",),
    "Share of recent time in which the device computed, for all processes, from 0 to 1. Needs the package "
    "nvidia-ml-py.",
)
DEVICE_BATCHES: Final = counter(
    "ortserve_device_batches_total",
    ("model", "version", "way"),
    "Batches on a device by how they ran. replayed: a captured graph. bound: on device buffers. plain_*: without "
    "either, because the batch size was not prepared (plain_no_bucket), the shape differs (plain_other_shape), the "
    "model has no buffers (plain_unbound; its metadata gives the reason) or warm-up is running (plain_not_prepared).",
)
DEVICE_CAPTURES: Final = counter(
    "ortserve_device_captures_total",
    ("model", "version", "result"),
    "captured: graphs that are replayed, one per batch size and buffer set of an instance. Other results count batch "
    "sizes that run without replay: failed (the capture failed), wrong_answer (the replay differed from a plain run), "
    "over_limit (too many sizes are captured), trial_refused (the trial in another process failed, crashed or hung), "
    "control_flow, other_provider (some nodes run on the CPU or on another execution provider), shrinks_arena "
    "(session.shrink_arenas), tunes (tunable_op_tuning_enable), builds_anew (TensorRT without buckets or engine "
    "cache), no_buffers. The model's metadata gives each reason in words.",
)
DEVICE_COPIED: Final = counter(
    "ortserve_device_copied_bytes_total",
    ("model", "version", "direction"),
    "Bytes of inputs copied to the device (in) and of outputs copied from it (out).",
)
DEVICE_TIMED_COPY: Final = counter(
    "ortserve_device_timed_copy_seconds_total",
    ("model", "version", "direction"),
    "Time of copies to and from the device, measured for every 64th batch.",
)
DEVICE_TIMED_COPY_BYTES: Final = counter(
    "ortserve_device_timed_copy_bytes_total", ("model", "version", "direction"), "Bytes of the copies that were timed."
)
LOOP_CPU_SECONDS: Final = counter(
    "ortserve_event_loop_cpu_seconds_total",
    (),
    "Processor time of the event loop, which reads and answers all requests. At nearly 1 per second this process "
    "can take no more requests: add a replica, even if its models are not saturated.",
)
LOOP_STALLS: Final = counter(
    "ortserve_event_loop_stalls_total",
    (),
    "Stalls of the event loop, which serves all connections: it did not respond for about a second or more. The log "
    "names the step.",
)
LOOP_STALL_SECONDS: Final = counter(
    "ortserve_event_loop_stall_seconds_total", (), "Total time of stalls of the event loop. It rises during a stall."
)
BUSY_POLL_SECONDS: Final = counter(
    "ortserve_busy_poll_seconds_total",
    (),
    "Time in which the event loop polled for the next request instead of sleeping (busy_poll_us).",
)
BUSY_POLLS: Final = counter(
    "ortserve_busy_polls_total",
    ("result",),
    "Times that the event loop polled for the next request. hit: a request arrived meanwhile, without a wake-up of "
    "the process. miss: no request arrived in time.",
)
GRPC_STREAMS: Final = gauge("ortserve_grpc_streams", (), "Open gRPC streams: inference, health and reflection.")
HTTP_CUT_ANSWERS: Final = counter(
    "ortserve_http_cut_answers_total",
    ("cause",),
    "HTTP answers of more than 64 KiB that ended before the caller received all of them, by cause: disconnected, "
    "too_slow (http_send_timeout_s) or overloaded (http_unsent_bytes, http_max_connections). Most of these requests "
    "count as ok in ortserve_request_duration_seconds, which ends when the answer is encoded.",
)
GRPC_CUT_ANSWERS: Final = counter(
    "ortserve_grpc_cut_answers_total",
    ("cause",),
    "Answers of the native gRPC transport that ended before the caller received all of them, by cause: disconnected, "
    "reset_by_caller, connection_error, stream_error, overloaded (grpc_max_connections), or the status of the call. "
    "Most of these requests count as ok in ortserve_request_duration_seconds, which ends when the answer is encoded.",
)
GRPC_CONNECTION_ERRORS: Final = counter(
    "ortserve_grpc_connection_errors_total",
    ("code",),
    "Connections of the native gRPC transport that the server closed with an HTTP/2 error, by error code. "
    "enhance_your_calm: the peer exceeded a limit on frames that carry no data.",
)
IDLE_EVICTIONS: Final = counter(
    "ortserve_idle_evictions_total",
    ("kind",),
    "Idle connections and gRPC streams that were closed for new ones at the limit of their number, by kind: "
    "http_connection (http_max_connections), grpc_connection (grpc_max_connections) or grpc_stream (grpc_max_streams).",
)
CERTIFICATE_EXPIRATION: Final = gauge(
    "ortserve_tls_certificate_expiration_timestamp_seconds",
    (),
    "Earliest expiration of the certificates that the server presents, in seconds since 1970. Only with TLS.",
)
CERTIFICATE_RELOADS: Final = counter(
    "ortserve_tls_certificate_reloads_total",
    ("outcome",),
    "Changes of the TLS files by outcome. ok: the new files are in use. failed: the old files stay in use. A "
    "certificate that is not valid yet counts as failed, and as ok once it is valid.",
)
EXPORTED_SPANS: Final = counter("ortserve_exported_spans_total", (), "Spans that a trace collector accepted.")
DROPPED_SPANS: Final = counter(
    "ortserve_dropped_spans_total",
    (),
    "Spans that were not delivered, because the export queue was full or the collector did not accept them in time.",
)
BUILD_INFO: Final = gauge(
    "ortserve_build_info", ("version", "python", "onnxruntime"), "Always 1. The labels hold the versions."
)

DECLARATIONS: Final = tuple(value for value in list(globals().values()) if isinstance(value, Declaration))
"""Every metric above, in the same order."""

MODEL_STATES: Final = ("loading", "warming", "ready", "draining", "gone", "failed")
"""Values of the label ``state``, in the order in which a version passes through them."""
