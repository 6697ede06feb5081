"""No two shapes, nor two sets of buffers, have one id."""

from hypothesis import given
from hypothesis import strategies as st

from ortserve.engine.device.graph_ids import SETS, graph_id
from ortserve.engine.run_options import NEITHER

ROWS = st.integers(1, 65536)
SET = st.integers(0, SETS - 1)


@given(ROWS, SET, ROWS, SET)
def test_an_id_stands_for_one_number_of_rows_and_one_set(rows: int, index: int, others: int, other: int) -> None:
    assert (graph_id(rows, index) == graph_id(others, other)) == ((rows, index) == (others, other))


@given(ROWS, SET)
def test_an_id_is_none_of_onnx_runtimes_own(rows: int, index: int) -> None:
    assert graph_id(rows, index) not in (0, NEITHER)
    assert graph_id(rows, index) < 2**31
