"""What a model's options say that has no effect on the model as it was loaded: each with its reason."""

from ortserve.config.model import ModelOptions


def threads_in_vain(options: ModelOptions, *, has_global_threads: bool) -> tuple[str, ...]:
    """What a model's own options say of threads that none of its sessions has."""
    session = options.session
    if has_global_threads:
        said = {
            "intra_op_threads": options.intra_op_threads if "intra_op_threads" in options.model_fields_set else None,
            "session.inter_op_threads": "inter_op_threads" in session.model_fields_set,
        }
        return tuple(f"{key}: all models share the threads of global_threads" for key in said if said[key])
    if session.inter_op_threads > 1 and session.execution_mode == "sequential":
        return ("session.inter_op_threads: they are of the execution_mode parallel, and it is sequential",)
    return ()


def sizes_in_vain(options: ModelOptions, most_rows: int | None) -> tuple[str, ...]:
    """What a model's own options say of batches that are larger than any."""
    if most_rows is None:
        return ()
    larger = [str(rows) for rows in options.preferred_rows if rows > most_rows]
    return (f"preferred_rows: {', '.join(larger)}: batches have at most {most_rows} rows",) if larger else ()


def gpus_in_vain(options: ModelOptions, provider: str) -> tuple[str, ...]:
    """What a model's own options say of GPUs where it runs on none."""
    own = options.model_fields_set
    said = {"gpus": bool(options.gpus), "graph_replay": options.graph_replay and "graph_replay" in own}
    return tuple(f"{key}: the model is on {provider}" for key in said if said[key])
