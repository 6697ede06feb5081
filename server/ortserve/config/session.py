"""How ONNX Runtime is told to run a model: execution providers with their options, and the settings of its sessions."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema

from ortserve.config.session_entries import SESSION_ENTRIES, check_session_entry

Scalar: TypeAlias = bool | int | float | str
"""A value of ONNX Runtime's options, all of which are texts to it: true is ``1``, false ``0``."""

ProviderName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[\w.]+$")]
ProviderWish: TypeAlias = (
    ProviderName | Annotated[Mapping[ProviderName, Mapping[str, Scalar]], Field(min_length=1, max_length=1)]
)
"""An execution provider by name, or ``{name: {option: value}}``."""

SessionEntry: TypeAlias = Annotated[
    str,
    AfterValidator(check_session_entry),
    WithJsonSchema({"type": "string", "enum": sorted(SESSION_ENTRIES)}),
]

GraphOptimization: TypeAlias = Literal["none", "basic", "extended", "layout", "all"]


class SessionSettings(BaseModel):
    """Settings of ONNX Runtime's sessions; the defaults are those that suit a server."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    graph_optimization: GraphOptimization = "all"
    """How far the graph is rewritten at load. Less makes loading faster and results closer to the exporter's.
    Weights in files of their own are read from beside the model's."""
    execution_mode: Literal["sequential", "parallel"] = "sequential"
    """``parallel`` runs independent branches of the graph at the same time, on ``inter_op_threads`` threads."""
    inter_op_threads: int = Field(default=1, ge=1, le=1024)
    """Threads for branches of the graph, in the execution mode ``parallel``."""
    spinning: bool = False
    """Let idle threads of a session wait in a busy loop: quicker to start, at the cost of whatever else runs there."""
    memory_arena: bool = True
    """Keep freed memory for the next run. Without it memory goes back at once, and runs are a little slower."""
    memory_pattern: bool | None = None
    """Plan the memory of a whole run, once for each shape of its inputs. Unset: where the first axis of inputs alone is
    free, or every other one has its length from ``free_dimensions``. Elsewhere there would be a plan for each length
    that ever came, seldom used again and kept until the model is unloaded."""
    shared_arena: bool = False
    """Take host memory from one arena that all models with this setting share, instead of one each: less memory where
    many models are seldom busy at the same time, but runs then wait for each other where they allocate."""
    shrink_arenas: tuple[Annotated[str, StringConstraints(pattern=r"^(cpu|gpu):\d+$")], ...] = Field(
        default=(), json_schema_extra={"expects": "list of arenas such as cpu:0"}
    )
    """Arenas, such as ``cpu:0`` or ``gpu:0``, that give back what they do not need after every run."""
    thread_affinities: str | None = Field(
        default=None, pattern=r"^\d+([,-]\d+)*(;\d+([,-]\d+)*)*$", json_schema_extra={"expects": "text such as 1,2;3-4"}
    )
    """Processors for each thread but the calling one, groups separated by semicolons, counted from 1: ``1;2`` for
    ``intra_op_threads: 3``. Unset: the system places threads, which serves several models better."""
    dynamic_block_base: int | None = Field(default=None, ge=1, le=1024)
    """Cut work for threads into ever smaller blocks, such as 4: steadier times where processors are shared with others.
    Unset: equal blocks, which cost less to hand out."""
    denormal_as_zero: bool = False
    """Take numbers too small to be normal as 0, which is many times faster for models that have them, and changes their
    results: in what runs of this model compute on processors, and in what ONNX Runtime computes of it while it is
    opened; not in what GPUs compute. Refused where it could not be so in all threads of a run and in no other model's:
    with ``global_threads``, and on machines other than x86-64 and aarch64 with glibc."""
    free_dimensions: Mapping[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, json_schema_extra={"expects": "{dimension: length, ...}"}
    )
    """Lengths of dimensions that the model only names, so that its graph is rewritten for them; requests of any other
    length are refused."""
    free_dimensions_by_denotation: Mapping[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, json_schema_extra={"expects": "{denotation: length, ...}"}
    )
    """The same by what the model says that a dimension is for, such as ``DATA_WIDTH``, in capitals or not."""
    optimized_model_file: str | None = Field(
        default=None, pattern="^/", json_schema_extra={"expects": "absolute path of a file"}
    )
    """File to keep the rewritten graph in, of the version that was opened last: for a look at it, or to be served with
    ``graph_optimization: none``, which loads faster, but only on this kind of machine with this version of ONNX Runtime
    and these execution providers. Within the model's folder it is no change of the model, nor is what execution
    providers keep there by their options (``trt_engine_cache_path``) or by ``ep.context_enable``, nor what is written
    there by ``session.collect_node_memory_stats_to_file``."""
    deterministic: bool = False
    """Choose kernels that give the same result for the same input every time, where there are such."""
    entries: Mapping[SessionEntry, Scalar] = Field(default_factory=dict)
    """Entries of ONNX Runtime's session configuration, such as ``session.set_denormal_as_zero: 1``, handed on as they
    are. One that ONNX Runtime does not know is refused here, because it would not say so itself."""
    operator_libraries: tuple[str, ...] = ()
    """Shared libraries with operators of the model's own. A path that is not absolute is one in the model's folder."""


def option_text(value: Scalar) -> str:
    """A value as ONNX Runtime takes it."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def provider_parts(wish: ProviderWish) -> tuple[str, dict[str, str]]:
    """The name of a provider, and its options as texts."""
    if isinstance(wish, str):
        return wish, {}
    ((name, options),) = wish.items()
    return name, {option: option_text(value) for option, value in options.items()}
