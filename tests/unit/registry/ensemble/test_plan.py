"""The plan of an ensemble: faults of its graph, and the steps that a request needs."""

import random
from collections.abc import Sequence

import pytest

from ortserve.config.model import LoadOptions, ModelOptions, make_model_options
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.errors import ServeError
from ortserve.registry.ensemble.interface import Member, resolve_signature
from ortserve.registry.ensemble.plan import find_cycle, make_plan

Steps = list[tuple[str, dict[str, str], dict[str, str]]]


def options(inputs: Sequence[str], outputs: Sequence[str], steps: Steps) -> ModelOptions:
    given = {
        "inputs": {name: {} for name in inputs},
        "outputs": {name: {} for name in outputs},
        "ensemble": {"steps": [{"model": model, "inputs": read, "outputs": made} for model, read, made in steps]},
    }
    return make_model_options(given, LoadOptions(), "model.yaml")


@pytest.mark.parametrize(
    ("inputs", "outputs", "steps", "text"),
    [
        (["x"], ["y"], [("m", {"a": "x"}, {"b": "y"}), ("m", {"a": "x"}, {"b": "y"})], "'y' can appear in an output"),
        (["x"], ["y"], [("m", {"a": "x"}, {"b": "x", "c": "y"})], "'x' can appear in an output map only once"),
        (["x", "z"], ["y"], [("m", {"a": "x"}, {"b": "y"})], "ensemble input 'z' for ensemble e' is not used"),
        (["x"], ["y", "z"], [("m", {"a": "x"}, {"b": "y"})], "ensemble output 'z' for ensemble e' is not used"),
        (["x"], ["y"], [("m", {"a": "x"}, {"b": "y", "c": "u"})], "ensemble tensor 'u' is unused in ensemble 'e'"),
        (
            ["x"],
            ["y"],
            [("m", {"a": "x", "c": "t"}, {"b": "u"}), ("m", {"a": "u"}, {"b": "t", "c": "y"})],
            "output 'y' for ensemble 'e' is not written: at least one of its depending tensors, 't', is not connected",
        ),
        (
            ["x"],
            ["y"],
            [("m", {"a": "x"}, {"b": "y"}), ("m", {"a": "u"}, {"b": "t"}), ("m", {"a": "t"}, {"b": "u"})],
            "ensemble tensor 'u' is not written in ensemble 'e'",
        ),
        ([], ["y"], [("m", {"a": "x"}, {"b": "y"})], "inputs: expected the names"),
    ],
)
def test_faults_of_the_graph_are_found(inputs: list[str], outputs: list[str], steps: Steps, text: str) -> None:
    with pytest.raises(ServeError) as error:
        make_plan("e", options(inputs, outputs, steps))
    assert text in error.value.message


@pytest.mark.parametrize(
    ("read", "made", "text"),
    [
        (
            {"rare": "x"},
            {"b": "y"},
            "mapping to non-existing input rare in model m: it is not served, because why",
        ),
        (
            {"a": "x"},
            {"odd": "y"},
            "mapped from non-existing output odd in model m: it is not served, because how",
        ),
    ],
)
def test_the_reason_for_an_unserved_tensor_of_a_member_is_named(
    read: dict[str, str], made: dict[str, str], text: str
) -> None:
    inputs, outputs = [(TensorSpec(name, DataType.FP32, (-1, 4)),) for name in "ab"]
    member = Member("m", ModelSignature(inputs, outputs, "", {"rare": "why"}, {"odd": "how"}), None)
    given = options(["x"], ["y"], [("m", read, made)])
    with pytest.raises(ServeError) as error:
        resolve_signature("e", given, make_plan("e", given), [member])
    assert error.value.message.endswith(text)


def test_a_request_needs_only_the_steps_that_lead_to_its_outputs() -> None:
    steps: Steps = [
        ("left", {"a": "x"}, {"b": "l"}),
        ("right", {"a": "x"}, {"b": "r", "c": "extra"}),
        ("join", {"a": "l", "b": "r"}, {"c": "y"}),
    ]
    plan = make_plan("e", options(["x"], ["y", "l", "extra"], steps))
    everything = plan.select(plan.outputs)
    assert (everything.steps, everything.first, everything.waits) == ((0, 1, 2), (0, 1), (0, 0, 2))
    assert everything.followers == ((2,), (2,), ())
    left = plan.select([plan.tensors.index("l")])
    assert (left.steps, left.outputs) == ((0,), (("b",), (), ()))
    extra = plan.select([plan.tensors.index("extra")])
    assert (extra.steps, extra.outputs[1]) == ((1,), ("c",))


def numbered(letter: str, names: list[str]) -> dict[str, str]:
    return {f"{letter}{number}": name for number, name in enumerate(names)}


@pytest.mark.parametrize("seed", range(40))
def test_every_selection_computes_what_a_plain_evaluation_computes(seed: int) -> None:
    """Random graphs: following the counts of a selection runs each needed step once, with all its tensors available."""
    rng = random.Random(seed)
    known, steps = ["x0", "x1"], []
    for number in range(rng.randint(1, 12)):
        read = rng.sample(known, rng.randint(1, min(3, len(known))))
        made = [f"t{number}_{index}" for index in range(rng.randint(1, 2))]
        steps.append(
            (f"m{number}", {f"i{k}": name for k, name in enumerate(read)}, {f"o{k}": n for k, n in enumerate(made)})
        )
        known += made
    read_names = {name for _, read, _ in steps for name in read.values()}
    inputs = [name for name in ("x0", "x1") if name in read_names]
    outputs = [name for _, _, made in steps for name in made.values() if name not in read_names or rng.random() < 0.3]
    rng.shuffle(steps)
    plan = make_plan("e", options(inputs, outputs, steps))
    wanted = rng.sample(list(plan.outputs), rng.randint(1, len(plan.outputs)))
    selection = plan.select(wanted)

    written = {tensor: number for number, step in enumerate(plan.steps) for tensor in step.outputs.values()}

    def needs(tensor: int) -> set[int]:
        if tensor not in written:
            return set()
        step = plan.steps[written[tensor]]
        return {written[tensor]}.union(*map(needs, step.inputs.values()))

    assert set(selection.steps) == set().union(*map(needs, wanted))
    there, waits, readers = set(plan.inputs), list(selection.waits), list(selection.readers)
    ready, done = list(selection.first), []
    while ready:
        number = ready.pop(rng.randrange(len(ready)))
        step = plan.steps[number]
        assert there.issuperset(step.inputs.values())
        for tensor in set(step.inputs.values()):
            readers[tensor] -= 1
            assert readers[tensor] >= 0
        there.update(step.outputs.values())
        done.append(number)
        for follower in selection.followers[number]:
            waits[follower] -= 1
            if not waits[follower]:
                ready.append(follower)
    assert sorted(done) == list(selection.steps)
    assert there.issuperset(wanted)
    assert all(readers[tensor] == 1 for tensor in wanted)  # the answer itself reads them


def test_cycles_between_ensembles_are_found() -> None:
    members = {"a": ["m", "b"], "b": ["c"], "c": ["a"], "d": ["a"], "e": ["e"]}
    assert find_cycle("a", members) == ("a", "b", "c", "a")
    assert find_cycle("e", members) == ("e", "e")
    assert find_cycle("d", members) == ()
