"""A file that breaks a rule is refused with file, line, field and limit; numbers are those of YAML 1.2."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pdserve.base.errors import ConfigError
from pdserve.base.yaml_models import FieldError, read_model


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Circle(Part):
    kind: Literal["circle"]
    radius: float = Field(alias="radiusMm", gt=0)


class Square(Part):
    kind: Literal["square"]
    side: int
    names: dict[Annotated[str, Field(pattern="^[a-z]+$")], float] = {}


class Drawing(Part):
    title: str
    limit: int = Field(10, ge=1)
    shape: Circle | Square = Field(discriminator="kind")
    others: list[Part] = []
    at: Any = None

    @model_validator(mode="after")
    def _fit(self) -> "Drawing":
        if isinstance(self.shape, Square) and self.shape.side > self.limit:
            raise FieldError(("shape", "side"), f"{self.shape.side} is above limit, {self.limit}")
        return self


GOOD = "title: a\nlimit: 3\nshape:\n  kind: square\n  side: 2\nat: 1\n"


def read(tmp_path: Path, text: str) -> Drawing:
    path = tmp_path / "drawing.yaml"
    path.write_text(text)
    return read_model(Drawing, path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("limit: 3", "limit: 0", "line 2: limit: 0 is refused: Input should be greater than or equal to 1"),
        ("limit: 3", "limitt: 3", "line 2: limitt: unknown key, did you mean limit?"),
        ("limit: 3", "zzzz: 3", "line 2: zzzz: unknown key"),
        ("title: a\n", "", "line 1: title: is required"),
        ("side: 2", "side: 9", "line 5: shape.side: 9 is above limit, 3"),
        (
            "side: 2",
            "sides: 2",
            "line 5: shape.sides: unknown key, did you mean side?; line 3: shape.side: is required",
        ),
        ("kind: square", "kind: oval", "line 4: shape.kind: 'oval' is refused: must be one of 'circle', 'square'"),
        ("  kind: square\n", "", "line 3: shape.kind: is required"),
        ("kind: square\n  side: 2", "kind: circle\n  radius: 2", "line 5: shape.radius: unknown key, did you mean rad"),
        ("kind: square", "kind: square\n  names: {A: 1}", "line 5: shape.names.A: 'A' is refused: String should match"),
        ("at: 1", "at: 1\nothers: [{}, {a: 1}]", "line 7: others.1.a: unknown key"),
        ("limit: 3", "limit: 3\nlimit: 4", "line 3: limit: is there twice"),
        ("limit: 3", "limit: [", "line "),
        ("at: 1", f"at: 1\nlimits: {'9' * 5000}", "Exceeds the limit"),
        (GOOD, "", "line 1: the file: must hold keys and values"),
        (GOOD, "- 1", "line 1: the file: must hold keys and values"),
        (GOOD, "? [a, b]\n: 1", "line 1: "),
        (GOOD, "[" * 1500, "is nested too deeply"),
        (GOOD, "at: &a\n  b: *a", "line 1: title: is required"),
    ],
)
def test_a_fault_is_named_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, GOOD.replace(old, new))
    assert str(caught.value).startswith(f"{tmp_path / 'drawing.yaml'}")
    assert message in str(caught.value)


def test_a_long_value_is_not_repeated_in_full(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, GOOD.replace("limit: 3", f"limit: {'x' * 9999}"))
    assert len(str(caught.value)) < 500 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("=", "="),
        ("12:30", "12:30"),  # YAML 1.1 takes these for other numbers, for a date, or for a text
        ("010", "010"),
        ("08", "08"),
        ("2026-01-01", "2026-01-01"),
        ("1e-3", 0.001),
        ("1.5e3", 1500.0),
        ("-7", -7),
        (".5", 0.5),
        ("3.", 3.0),
        ("0", 0),
        ("-.inf", float("-inf")),
        ("true", True),
        ("~", None),
        ("1_000", "1_000"),
    ],
)
def test_plain_values_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    found = read(tmp_path, GOOD.replace("at: 1", f"at: {text}")).at
    assert (type(found), found) == (type(value), value)


def test_merged_mappings_may_be_overridden(tmp_path: Path) -> None:
    text = GOOD.replace("at: 1", "at: {a: &x {b: 1, c: 2}, d: {<<: *x, b: 3}}")
    assert read(tmp_path, text).at["d"] == {"b": 3, "c": 2}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"drawing.yaml: No such file"):
        read_model(Drawing, tmp_path / "drawing.yaml")
    (tmp_path / "drawing.yaml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"drawing.yaml: .*utf-8"):
        read_model(Drawing, tmp_path / "drawing.yaml")
