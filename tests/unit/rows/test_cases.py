"""Every family of operators in both directions, and every known trap, against the proof and against ONNX Runtime."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import onnx
import pytest

from ortserve.model_file.reading import parse_model
from ortserve.rows import Outcome, prove_axes, prove_model
from ortserve.rows.rules import RULES
from ortserve.rows.rules.call import Call, NotKnownError, Output, RandomError, RowsMeetError, Rule
from rows import brute_force
from rows.brute_force import BATCHES, Claim, RefusedError, disagreement, observe
from rows.cases import Case, rows_meet
from rows.claims import check_model
from rows.families import APART, MEET, NOT_RUN
from rows.traps import BRANCH, TRAPS

NEVER_PROVEN: Final = {
    ("", "NonMaxSuppression"): "the number of results depends on all boxes",
    ("", "Unique"): "the number of results depends on all entries",
    ("com.microsoft", "Unique"): "the number of results depends on all entries",
    ("com.microsoft", "DynamicQuantizeLSTM"): "one scale quantizes all entries",
    ("com.microsoft", "DynamicQuantizeMatMul"): "one scale quantizes all entries",
}
"""Operators whose rules claim nothing about any operand, with the reason."""


def _names(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


@pytest.mark.parametrize("case", APART, ids=_names(APART))
def test_rows_that_stay_apart_are_proven_and_do(case: Case) -> None:
    model = parse_model(memoryview(case.model.SerializeToString()))
    verdict = prove_axes(model, case.axes)
    assert verdict.outcome is Outcome.PROVEN, f"{verdict.node}: {verdict.reason}"
    assert prove_model(model).input_axes == case.axes
    for name, seen in case.observe(inside=False).items():
        axis = verdict.output_axes[name]
        kind = brute_force.Kind.FREE if axis is None else brute_force.Kind.ROWS
        assert disagreement(Claim(kind, axis or 0), seen) == "", name


@pytest.mark.parametrize("case", NOT_RUN, ids=_names(NOT_RUN))
def test_rows_that_stay_apart_in_operators_without_a_kernel_on_cpus_are_proven(case: Case) -> None:
    verdict = prove_axes(parse_model(memoryview(case.model.SerializeToString())), case.axes)
    assert verdict.outcome is Outcome.PROVEN, f"{verdict.node}: {verdict.reason}"
    with pytest.raises(RefusedError, match="Could not find an implementation"):
        case.observe(inside=False)


def _outcomes(cases: Iterable[Case], patch: pytest.MonkeyPatch) -> dict[tuple[str, str], set[type]]:
    """For each rule, the types of the errors that it raises in these models, and ``Rule`` if it returns a claim."""
    outcomes: dict[tuple[str, str], set[type]] = {key: set() for key in RULES}

    def watched(rule: Rule, outcomes: set[type]) -> Rule:
        def apply(call: Call) -> Output:
            try:
                claim = rule.apply(call)
            except Exception as error:
                outcomes.add(type(error))
                raise
            outcomes.add(Rule)
            return claim

        return replace(rule, apply=apply)

    with patch.context() as patched:
        for key, rule in RULES.items():
            patched.setitem(RULES, key, watched(rule, outcomes[key]))
        for case in cases:
            prove_axes(parse_model(memoryview(case.model.SerializeToString())), case.axes)
    return outcomes


def test_each_rule_is_part_of_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = _outcomes(APART + NOT_RUN, monkeypatch)
    assert {key for key, seen in proofs.items() if Rule not in seen} == NEVER_PROVEN.keys()


def test_no_rule_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {Rule, NotKnownError, RowsMeetError, RandomError}
    outcomes = _outcomes(APART + NOT_RUN + MEET + TRAPS, monkeypatch)
    assert {key: seen - expected for key, seen in outcomes.items() if seen - expected} == {}
    assert {key for key in NEVER_PROVEN if RowsMeetError not in outcomes[key]} == set()


@pytest.mark.parametrize("case", MEET + TRAPS, ids=_names(MEET + TRAPS))
def test_rows_that_meet_are_never_proven(case: Case) -> None:
    model = parse_model(memoryview(case.model.SerializeToString()))
    assert prove_axes(model, case.axes).outcome is not Outcome.PROVEN
    found = prove_model(model)
    # Rows may be independent on another axis.
    assert found.outcome is not Outcome.PROVEN or found.input_axes != case.axes
    if case.refused_alone:
        with pytest.raises(RefusedError):
            case.observe(inside=False)
    else:
        assert rows_meet(case.observe(inside=False)), "the rows of this model do not meet, so it shows nothing"


@pytest.mark.parametrize("case", APART + MEET + TRAPS, ids=_names(APART + MEET + TRAPS))
def test_every_claim_inside_is_true(case: Case) -> None:
    for seed in range(3):
        try:
            seen = observe(case.model, case.rows(seed), case.axes, BATCHES)
        except RefusedError:
            assert case.refused_alone or case.feeds, "a row alone is refused"
            continue
        check = check_model(case.model, case.axes, seen)
        assert not check.findings


def test_sizes_of_one_name_are_assumed_equal_where_one_may_be_copied_for_the_other() -> None:
    trap = next(case for case in TRAPS if case.name.startswith("a size that is called like another"))
    weights = trap.weights.removesuffix(", float[N,A,2] h")
    body = trap.body.removeprefix("h = Relu(w) ")
    case = Case("reshape: sizes of one name", "float[N,A,2] z, float[N,A,2] h", body, weights)
    verdict = prove_model(parse_model(memoryview(case.model.SerializeToString())))
    assert verdict.outcome is Outcome.PROVEN
    assert verdict.equal_sizes == ("A",)
    rows = [{"z": row["z"], "h": row["w"]} for row in trap.rows()]
    assert rows_meet(observe(case.model, rows, case.axes, BATCHES, inside=False)), "the rows stay apart anyway"


def test_a_size_that_a_reshape_needs_is_assumed() -> None:
    inferred = "n = Shape<start=1, end=2>(x) h = Concat<axis=0>(two, n) t = Reshape(x, h) y = Softmax<axis=0>(t)"
    case = Case("reshape: a size that ONNX Runtime infers", "float[M,N] x", inferred, "int64[1] two = {2}")
    model = parse_model(memoryview(case.model.SerializeToString()))
    assert prove_model(model).fixed_sizes == (("M", 2),)


@pytest.mark.parametrize(
    ("computed", "length", "other"),
    [
        ("p = Mul(c, c)", 46_341, 1),
        ("p = Mul(c, thousand)", 2_147_484, 1),
        ("p = Mul(c, d)", 9_000, 240_000),
        ("r = Resize(u, , scale) n = Shape(r) k = Cast<to=6>(n) p = Sub(k, d)", 5, 16_777_217),
        (
            "r = MaxPool<kernel_shape=[1], ceil_mode=1>(i) n = Shape<start=2>(r) k = Cast<to=6>(n) p = Sub(k, d)",
            5,
            16_777_218,
        ),
    ],
    ids=["a square", "a multiple", "a product of two sizes", "a size from a scale", "a number of windows"],
)
def test_the_longest_axis_for_which_numbers_are_exact_is_assumed(computed: str, length: int, other: int) -> None:
    sizes = (
        "l = Shape<start=1>(x) c = Cast<to=6>(l) m = Shape(z) d = Cast<to=6>(m) u = Cast<to=2>(z) i = Reshape(u, image)"
    )
    body = f"{sizes} {computed} g = Less(p, zero) {BRANCH}"
    weights = "int32[1] zero = {0}, int32[1] thousand = {1000}, float[1] scale = {1}, int64[3] image = {1, 1, -1}"
    case = Case("axis: long", "float[N,L] x, bool[M] z", body, weights, sizes={"L": length, "M": other})
    verdict = prove_axes(parse_model(memoryview(case.model.SerializeToString())), case.axes)
    assert verdict.outcome is Outcome.PROVEN
    assert verdict.longest_axis < max(length, other)
    together = observe(case.model, case.rows(), case.axes, BATCHES[1:2], inside=False)
    assert rows_meet(together), "the rows stay apart anyway"


def test_rows_behind_a_target_size_that_may_be_0_are_not_proven_if_their_axis_may_have_entries_then() -> None:
    """No trap: ONNX Runtime infers a size of 3 for ``a`` where its target shape has 0, so that its claim is false."""
    sizes = "c = Slice(z, one, end, one) m = Shape<start=1, end=2>(c) n = Shape<start=0, end=1>(x)"
    joined = "t = Concat<axis=0>(n, m) a = Reshape(x, t) f = Reshape(a, less) w = Unsqueeze(f, zero)"
    copied = "u = Concat<axis=0>(less, m) v = Reshape(w, u) q = Softmax<axis=1>(v)"
    body = f"{sizes} {joined} {copied} k = Concat<axis=0>(n, less) y = Reshape(q, k)"
    weights = "int64[1] zero = {0}, int64[1] one = {1}, int64[1] end = {99}, int64[1] less = {-1}"
    case = Case("reshape: a size of 0", "float[N,T] x, float[N,S] z", body, weights, sizes={"T": 3, "S": 1})
    assert prove_model(parse_model(memoryview(case.model.SerializeToString()))).outcome is not Outcome.PROVEN
    assert rows_meet(case.observe(inside=False)), "the rows stay apart anyway"


def test_a_model_without_an_operator_set_has_the_newest_operators() -> None:
    case = Case("axis: DFT of the newest set", "float[N,4,1] x", "y = DFT(x, , a)", "int64 a = {0}", opset=20)
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    del model.opset_import[0]
    assert prove_model(parse_model(memoryview(model.SerializeToString()))).outcome is Outcome.MIXED


def test_a_branch_in_which_rows_meet_is_named_before_one_that_is_unknown() -> None:
    branches = "then_branch = t () => (a) { a = Col2Im(x, s, s) }, else_branch = e () => (b) { b = Softmax<axis=0>(x) }"
    case = Case("branch: unknown", "float[N,1,4] x, bool c", f"y = If(c) <{branches}>", "int64[2] s = {2, 2}", opset=18)
    assert prove_axes(parse_model(memoryview(case.model.SerializeToString())), case.axes).outcome is Outcome.MIXED


def test_windows_that_onnx_runtime_counts_otherwise_at_the_load_are_not_known() -> None:
    """It replaces Shape by the shape that it infers, which has 2 windows along an axis for which the kernel makes 1."""
    attributes = 'auto_pad="SAME_LOWER", ceil_mode=1, kernel_shape=[1, 2], strides=[2, 3]'
    case = Case("windows", "float[1,1,2,4] x", f"p = AveragePool<{attributes}>(x) y = Shape(p)", opset=12)
    assert check_model(case.model, case.axes, case.observe(inside=False)).findings == {}
