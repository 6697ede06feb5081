"""Files keep their content; only the values and comments of changed keys differ."""

from pathlib import Path

import pytest

from ortserve.config.model import LoadOptions, load_model_options
from ortserve.errors import ServeError
from ortserve.tools.tune.space import apply_changes
from ortserve.tools.tune.writing import edit_text, write_options

OLD = """\
# digits, for the branch offices
max_rows: 1   # asked for in March
instances: 2

# how it runs
session:
    spinning: true   # why not
    # an entry
    entries:
        session.intra_op.spin_duration_us: 100
outputs:
    probabilities:
        labels:
          - "zero"
          - 'one'
execution_providers: [cpu]
# the end
"""
NEW = """\
# digits, for the branch offices
max_rows: null # asked for in March; 3 times
instances: 4

# how it runs
session:
    spinning: false  # why not; 1.2 times
    # an entry
    entries:
        session.intra_op.spin_duration_us: -1
    memory_arena: false
outputs:
    probabilities:
        labels:
          - "zero"
          - 'one'
execution_providers: [cpu]
buckets: [1, 2] # 1.1 times
# the end
"""
CHANGES = {
    "max_rows": None,
    "instances": 4,
    "session.spinning": False,
    "session.entries.session.intra_op.spin_duration_us": -1,
    "session.memory_arena": False,
    "buckets": [1, 2],
}
COMMENTS = {"max_rows": "3 times", "session.spinning": "1.2 times", "buckets": "1.1 times"}


def squeezed(text: str) -> list[str]:
    return [" #".join(part.strip() for part in line.split("#")) if "#" in line else line for line in text.splitlines()]


def test_comments_order_and_quotes_stay() -> None:
    assert squeezed(edit_text(OLD, CHANGES, COMMENTS)) == squeezed(NEW)


def test_a_comment_of_an_earlier_search_is_replaced() -> None:
    text = "max_rows: 8 # asked for in March\n"
    for gain in ("3 times", "2 times"):
        text = edit_text(text, {"max_rows": 1}, {"max_rows": f"ortserve tune: {gain}"})
    assert squeezed(text) == ["max_rows: 1 #asked for in March; ortserve tune: 2 times"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [("", ""), ("# only this\n", "# only this"), ("session: {spinning: true}\n# c\n", "# c"), ("inputs: {}\n", "{}")],
)
def test_any_form_of_file_gets_the_values(text: str, kept: str, tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(text)
    before = load_model_options(file, LoadOptions())
    write_options(file, CHANGES, COMMENTS, apply_changes(before, CHANGES))
    assert load_model_options(file, LoadOptions()).session.memory_arena is False
    assert kept in file.read_text()
    assert "1.2 times" in file.read_text()


def test_a_file_is_replaced_as_a_whole_behind_its_link(tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    real.write_text(OLD)
    real.chmod(0o640)
    link = tmp_path / "model" / "model.yaml"
    link.parent.mkdir()
    link.symlink_to(real)
    options = load_model_options(link, LoadOptions())
    write_options(link, CHANGES, COMMENTS, apply_changes(options, CHANGES))
    assert link.is_symlink()
    assert "3 times" in real.read_text()
    assert real.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "real.yaml"]


def test_a_file_that_would_mean_something_else_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(OLD)
    options = load_model_options(file, LoadOptions())
    with pytest.raises(ServeError, match="so it stays"):
        write_options(file, {"instances": 3}, {}, options)
    assert file.read_text() == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["model.yaml"]
