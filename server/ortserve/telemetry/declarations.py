"""Every metric of the server: its name, its labels and what it tells. ``metrics`` counts them."""

from typing import Final

from ortserve.core.timing import PHASES
from ortserve.telemetry.families import Declaration

_FROM_100_US: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)

REQUEST_DURATION: Final = Declaration(
    "ortserve_request_duration_seconds",
    "histogram",
    ("model", "version", "protocol", "outcome"),
    "Time from a request's complete body to its answer handed to the transport. The outcome is ok or the kind of "
    "error; model and version are empty where the request named none that is served.",
    _FROM_100_US,
)
PHASE_DURATION: Final = Declaration(
    "ortserve_request_phase_duration_seconds",
    "histogram",
    ("model", "version", "phase"),
    f"Time that an answered request spent in each phase: {', '.join(PHASES)}. They follow one another and sum to its "
    "duration.",
    (0.00001, 0.000025, 0.00005, *_FROM_100_US),
)
BATCH_ROWS: Final = Declaration(
    "ortserve_batch_rows",
    "histogram",
    ("model", "version"),
    "Rows that ran together in one batch.",
    tuple(float(2**power) for power in range(11)),
)
QUEUE_ROWS: Final = Declaration(
    "ortserve_queue_rows", "gauge", ("model", "version"), "Rows that wait for a free instance."
)
SATURATION: Final = Declaration(
    "ortserve_saturation",
    "gauge",
    ("model", "version"),
    "Rows offered a second, refused ones included, by the rows a second that the version's instances could compute in "
    "full batches, had they the device to themselves. Above 1 it needs more servers. The rate forgets within some 5 "
    "seconds, the time of a full batch is the learned one of the shape used last. Where models share a device, their "
    "sum counts. What the event loop spends on a request is not in it: see process_cpu_seconds_total for tiny models.",
)
BATCHING_DECISIONS: Final = Declaration(
    "ortserve_batching_decisions_total",
    "counter",
    ("model", "version", "decision"),
    "What the batcher decided, in numbers of batches, requests or rows: batches, inline and retries (batches that ran, "
    "on the event loop, or again in part); inline_overruns (1 once a run on the event loop took over 2 ms, after which "
    "all others run on workers); refused_full, refused_late, dropped_late and left (requests); delayed "
    "(waits for a set delay); wasted_rows and padding_rows (rows computed for no request); run_timeouts and abandoned "
    "(batches asked to end, and those that did not); out_of_memory (batches after "
    "which the most rows of a batch were halved).",
)
CHECKED_REQUESTS: Final = Declaration(
    "ortserve_checked_requests_total",
    "counter",
    ("model", "version", "outcome"),
    "Requests that shared a batch and were run again alone, by what the comparison of both answers showed: agreed; "
    "differed, after which each request of the version runs alone until it is loaded anew; not_deterministic (two runs "
    "alone differ from each other); failed (the run). No series for a model that is not checked (row_checks).",
)
BATCH_LATENCY: Final = Declaration(
    "ortserve_batch_latency_seconds",
    "gauge",
    ("model", "version", "rows"),
    "Time that a batch of so many rows is expected to take, for the shape used last.",
)
BATCH_LATENCY_ERROR: Final = Declaration(
    "ortserve_batch_latency_error_seconds",
    "gauge",
    ("model", "version"),
    "By how much batches take longer than expected: the 95th percentile.",
)
STAGED_ELEMENTS: Final = Declaration(
    "ortserve_staged_elements_total",
    "counter",
    ("model", "version"),
    "Elements of the inputs of batches, padding included; 0 for a model without pad and buckets.",
)
PADDED_ELEMENTS: Final = Declaration(
    "ortserve_padded_elements_total",
    "counter",
    ("model", "version"),
    "Of the staged elements, those that no request brought: what pad added to axes and buckets to rows.",
)
REJECTED: Final = Declaration(
    "ortserve_rejected_requests_total",
    "counter",
    ("model", "reason"),
    "Requests refused before any work was done for them, by the kind of error. The model is empty where the request "
    "named none that is served.",
)
UNAUTHORIZED: Final = Declaration(
    "ortserve_unauthorized_requests_total",
    "counter",
    ("group", "reason"),
    "Requests refused for want of a key, by the group of calls that they asked for and the kind of error: "
    "unauthenticated or forbidden. They are in no other metric.",
)
LOADS: Final = Declaration(
    "ortserve_model_loads_total",
    "counter",
    ("model", "outcome"),
    "Loads of a model's versions, reloads included, by how they ended: ok or failed.",
)
OVERDUE_BATCHES: Final = Declaration(
    "ortserve_overdue_batches_total",
    "counter",
    ("model", "outcome"),
    "Batches of a model's versions whose runs were over their time limit: terminated, which were asked to end, and "
    "abandoned, those of them that did not within run_grace_s, so that their instance was given up and the version is "
    "loaded anew.",
)
LOAD_DURATION: Final = Declaration(
    "ortserve_model_load_seconds",
    "gauge",
    ("model", "version"),
    "Time that loading took, warm-up included, of a version that serves.",
)
MODEL_STATE: Final = Declaration(
    "ortserve_model_state",
    "gauge",
    ("model", "version", "state"),
    "1 for the state that a model version is in, 0 for the others. The version is empty for a model of which none "
    "could be read.",
)
DEVICE_MEMORY: Final = Declaration(
    "ortserve_device_memory_bytes",
    "gauge",
    ("device", "kind"),
    "Memory of a device on which models have buffers: free, which nobody has, this process or another, and total.",
)
DEVICE_LEDGER: Final = Declaration(
    "ortserve_device_ledger_bytes",
    "gauge",
    ("device", "owner", "purpose"),
    "Memory of a device by the instance that has it and the purpose: buffers, to the byte; graphs, what the device had "
    "less of after they were captured; session, what it had less of besides, which is weights and workspace.",
)
DEVICE_PINNED: Final = Declaration(
    "ortserve_device_pinned_bytes",
    "gauge",
    ("device", "owner", "purpose"),
    "Memory of the host, none of it the device's, that is pinned for copies to and from it, to the byte, by the "
    "instance that has it and the purpose: staging, where batches are gathered; answers, where outputs come to and are "
    "read. The owner unloaded has answers of models that are gone: the next load or unload frees what nobody reads.",
)
DEVICE_UTILIZATION: Final = Declaration(
    "ortserve_device_utilization",
    "gauge",
    ("device",),
    "Share of the last moments in which the device computed, of whatever process, from 0 to 1. Where the package "
    "nvidia-ml-py is installed.",
)
DEVICE_BATCHES: Final = Declaration(
    "ortserve_device_batches_total",
    "counter",
    ("model", "version", "way"),
    "Batches of a model on a device by the way they ran: replayed (a captured graph), bound (on buffers of the "
    "device), or plain, without either, by why: plain_no_bucket (a size that was not prepared), plain_other_shape, "
    "plain_unbound (the model has no buffers, its metadata says why), plain_not_prepared (in warm-up).",
)
DEVICE_CAPTURES: Final = Declaration(
    "ortserve_device_captures_total",
    "counter",
    ("model", "version", "result"),
    "captured: graphs that are replayed, one for each batch size and buffer set of an instance. All else: batch sizes "
    "that were to be replayed and run without, by why: failed (the capture), wrong_answer (the replay did not give "
    "what a plain run gives), over_limit (as many sizes as may be are captured already), trial_refused (by another "
    "process, where captures are tried first; it may have crashed or hung), control_flow, other_provider (nodes are on "
    "the CPU or another execution provider), shrinks_arena (session.shrink_arenas), tunes (tunable_op_tuning_enable), "
    "builds_anew (TensorRT without buckets or an engine cache) or no_buffers. The model's metadata says each in words.",
)
DEVICE_COPIED: Final = Declaration(
    "ortserve_device_copied_bytes_total",
    "counter",
    ("model", "version", "direction"),
    "Bytes of inputs and outputs copied in, to the device, and out, from it.",
)
DEVICE_TIMED_COPY: Final = Declaration(
    "ortserve_device_timed_copy_seconds_total",
    "counter",
    ("model", "version", "direction"),
    "Time that copies in and out took, of every 64th batch.",
)
DEVICE_TIMED_COPY_BYTES: Final = Declaration(
    "ortserve_device_timed_copy_bytes_total",
    "counter",
    ("model", "version", "direction"),
    "Bytes of the copies that were timed.",
)
LOOP_STALLS: Final = Declaration(
    "ortserve_event_loop_stalls_total",
    "counter",
    (),
    "Times that the event loop, which serves all connections, stood still for a second or nearly. The log says what it "
    "was doing.",
)
LOOP_STALL_SECONDS: Final = Declaration(
    "ortserve_event_loop_stall_seconds_total",
    "counter",
    (),
    "Time in such stalls; it rises while one lasts.",
)
BUSY_POLL_SECONDS: Final = Declaration(
    "ortserve_busy_poll_seconds_total",
    "counter",
    (),
    "Time in which the event loop polled for the next request instead of sleeping: processor time that busy_poll_us "
    "allows.",
)
BUSY_POLLS: Final = Declaration(
    "ortserve_busy_polls_total",
    "counter",
    ("result",),
    "Times that the event loop polled for the next request: hit, it came meanwhile and was spared the waking of the "
    "process; miss, it did not come in time.",
)
GRPC_STREAMS: Final = Declaration(
    "ortserve_grpc_streams", "gauge", (), "gRPC streams that are open: of inference, of health and of reflection."
)
GRPC_CUT_ANSWERS: Final = Declaration(
    "ortserve_grpc_cut_answers_total",
    "counter",
    ("cause",),
    "Answers of the native gRPC transport that ended before the caller took all of them, by the cause: disconnected, "
    "reset_by_caller, connection_error, stream_error, or the status that ended the call. Most were counted as ok in "
    "ortserve_request_duration_seconds, which ends when an answer is encoded.",
)
GRPC_CONNECTION_ERRORS: Final = Declaration(
    "ortserve_grpc_connection_errors_total",
    "counter",
    ("code",),
    "Connections of the native gRPC transport that the server ended with an HTTP/2 error, by its code. "
    "enhance_your_calm: the peer exceeded a bound on what brings no answer.",
)
CERTIFICATE_EXPIRATION: Final = Declaration(
    "ortserve_tls_certificate_expiration_timestamp_seconds",
    "gauge",
    (),
    "When the first of the certificates that the server shows expires, in seconds since 1970. Only with TLS.",
)
CERTIFICATE_RELOADS: Final = Declaration(
    "ortserve_tls_certificate_reloads_total",
    "counter",
    ("outcome",),
    "New contents of the files of TLS, by what became of them: ok, or failed, where the old ones serve on. What "
    "is for later counts as failed, and as ok when its time comes.",
)
EXPORTED_SPANS: Final = Declaration(
    "ortserve_exported_spans_total",
    "counter",
    (),
    "Spans of traces that a collector has taken.",
)
DROPPED_SPANS: Final = Declaration(
    "ortserve_dropped_spans_total",
    "counter",
    (),
    "Spans of traces that no collector got, because too many waited or it did not take them in time.",
)
BUILD_INFO: Final = Declaration(
    "ortserve_build_info", "gauge", ("version", "python", "onnxruntime"), "Always 1; the labels say what is running."
)

DECLARATIONS: Final = (
    REQUEST_DURATION,
    PHASE_DURATION,
    BATCH_ROWS,
    QUEUE_ROWS,
    SATURATION,
    BATCHING_DECISIONS,
    CHECKED_REQUESTS,
    BATCH_LATENCY,
    BATCH_LATENCY_ERROR,
    STAGED_ELEMENTS,
    PADDED_ELEMENTS,
    REJECTED,
    UNAUTHORIZED,
    LOADS,
    OVERDUE_BATCHES,
    LOAD_DURATION,
    MODEL_STATE,
    DEVICE_MEMORY,
    DEVICE_LEDGER,
    DEVICE_PINNED,
    DEVICE_UTILIZATION,
    DEVICE_BATCHES,
    DEVICE_CAPTURES,
    DEVICE_COPIED,
    DEVICE_TIMED_COPY,
    DEVICE_TIMED_COPY_BYTES,
    LOOP_STALLS,
    LOOP_STALL_SECONDS,
    BUSY_POLL_SECONDS,
    BUSY_POLLS,
    GRPC_STREAMS,
    GRPC_CUT_ANSWERS,
    GRPC_CONNECTION_ERRORS,
    CERTIFICATE_EXPIRATION,
    CERTIFICATE_RELOADS,
    EXPORTED_SPANS,
    DROPPED_SPANS,
    BUILD_INFO,
)

MODEL_STATES: Final = ("loading", "warming", "ready", "draining", "gone", "failed")
"""Values of the ``state`` label, in the order that a version passes through them."""
