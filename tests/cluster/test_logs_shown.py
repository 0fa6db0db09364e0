"""A failing test of a live cluster shows what its processes logged."""

from pathlib import Path

import cluster_logs
import pytest

pytest_plugins = ["pytester"]
FAILING = """
from pathlib import Path
import cluster_logs

def test_fails(tmp_path: Path) -> None:
    logs = tmp_path / "pdserve" / "local" / "logs"
    logs.mkdir(parents=True)
    (logs / "decode-0.log").write_text("the decode worker's last words")
    cluster_logs.register(tmp_path)
    assert False
"""


def test_a_failing_test_shows_the_last_lines_of_every_process(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_logs, "_running", [])
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text())
    pytester.makepyfile(FAILING)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*Log of decode-0*", "the decode worker's last words"])
