"""Trials of random models as the server runs them: answers from batches against those to each request alone.

``try_seed`` may crash ONNX Runtime. Run it in another process, as ``ortserve.engine.child_process`` does.
"""

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from ortserve.engine.bounded_time import why_unbounded
from rows.brute_force import differ
from rows.random_graphs import grow, grow_widely
from rows.served import NotServed, Outputs, Request, Served, make_requests, served, with_proven_outputs


@dataclass(frozen=True, slots=True)
class Trial:
    """The result for one random model.

    Attributes:
        batches: Number of compared batches.
        not_served: Why the model is not served, or not in batches; empty if it is.
        finding: A wrong answer, with the model.
    """

    batches: int = 0
    not_served: str = ""
    finding: str = ""


def try_seed(seed: int) -> Trial:
    """Serve the model of a seed, and compare the answers to the requests of batches."""
    rng = random.Random(seed)
    graph = (grow_widely if rng.random() < 0.75 else grow)(seed)
    model = with_proven_outputs(graph, rng)
    if model is None:
        return Trial(not_served="no tensor has rows")
    with tempfile.TemporaryDirectory() as folder:
        try:
            with served(model, Path(folder) / "model.onnx") as one:
                return Trial(_check_batches(one, make_requests(graph, one.signature, rng, 8), rng))
        except AssertionError as error:
            return Trial(finding=f"seed {seed}: {error}\n{onnx.printer.to_text(model)}")
        except NotServed as error:
            return Trial(not_served=str(error))


def _check_batches(model: Served, requests: Sequence[Request], rng: random.Random) -> int:
    """Compare the answers to requests with small numbers while requests with extreme numbers are in the same batch.

    Answers to extreme numbers are compared only with those of another batch, at the same place among other requests:
    kernels may treat NaN as the largest number or not, depending on its place in memory. Returns the number of compared
    batches.
    """
    classes: dict[object, list[tuple[Request, Outputs]]] = {}
    for request in requests:
        alone = model.run_alone(request.inputs)
        found = model.shape_class(request.inputs)
        if alone is not None and found is not None:
            classes.setdefault(found, []).append((request, alone))
    is_bounded = not why_unbounded(model.content, model.signature)
    compared = 0
    for members in classes.values():
        shapes = {tuple(output.shape for output in alone) for _, alone in members}
        assert len(shapes) == 1 or not is_bounded, f"values decide about shapes, and so about time: {shapes}"
        for count in (2, 3, len(members)):
            batch = [rng.choice(members) for _ in range(count)]
            bucket = rng.choice((0, 8))
            together = model.run_together([request.inputs for request, _ in batch], bucket)
            if together is None:  # then the requests run alone
                continue
            compared += 1
            for (request, alone), outputs in zip(batch, together, strict=True):
                for spec, one, other in zip(model.signature.outputs, outputs, alone, strict=True):
                    assert request.is_wild or not differ(one, other), (
                        f"output '{spec.name}' of {request.inputs} among {len(batch)} is {one}, alone {other}"
                    )
            place = rng.randrange(count)
            kept = batch[place][0].inputs
            others = [kept if index == place else rng.choice(members)[0].inputs for index in range(count)]
            if (again := model.run_together(others, bucket)) is not None:
                for one, other in zip(together[place], again[place], strict=True):
                    assert not differ(one, other), f"the answer to {kept} at {place} depends on the others: {others}"
    return compared
