"""Sessions of agents on a simulated cluster: each ends, and names change where turns go, not what they say."""

from lab.sessions import measure_rounds
from pdserve.capacity.worker import Shape
from pdserve.measure.sessions import Shape as SessionsShape

SESSIONS = SessionsShape(sessions=10, turns=4, shared_tokens=1024, first_tokens=512, tool_tokens=128, pause_s=1.0)


def test_all_turns_are_served_with_names_and_without() -> None:
    unnamed, named = measure_rounds(Shape(2, 2), SESSIONS, 2, 0, lambda _: None)
    assert unnamed.num_turns == named.num_turns > 50
    assert not unnamed.turns
    assert sum(named.turns.values()) == named.num_turns
    assert named.turns["new"] == 20
    assert named.turns["kept"] > named.turns.get("left", 0)
    assert named.prefill_busy_s < 1.1 * unnamed.prefill_busy_s
