"""What commands print and how they end: 0 done, 1 failed outside, 2 refused what was asked for."""

import errno
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from mounts import mounted

import pdserve as package
from pdserve.base.errors import ConfigError, first_of
from pdserve.cli.app import main
from pdserve.cli.ask import VISIBLE
from pdserve.cli.models import model_name
from pdserve.cli.running import Terminal
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference

Command = Callable[..., CompletedProcess[str]]
Requests = list[inference.GenerateRequest]

LEDGER = "TTFT 40 ms | TPOT 7.9 ms | 5 tokens in (0 cached), 3 out | hand-off 2.50 MB in 1.2 ms | prefill-0 -> decode-0"


def test_generate_streams_the_text_then_says_where_the_time_went(
    pdserve: Command, address: str, requests: Requests
) -> None:
    ended = pdserve("generate", "count", "--max-tokens", "3", "--endpoint", address)
    assert (ended.returncode, ended.stdout) == (0, " 1 2 3\n")  # a file gets the answer alone
    assert ended.stderr == f"{LEDGER}\n"
    request = requests[-1]
    assert request.text == "count"
    assert not request.sampling.HasField("temperature")  # the router's default, not the command line's


def test_sampling_flags_reach_the_request(pdserve: Command, address: str, requests: Requests) -> None:
    flags = ("--temperature", "0.5", "--top-k", "7", "--top-p", "0.25", "--min-p", "0.125", "--seed", "9")
    more = ("--stop", "a", "--stop", "b", "--ignore-eos", "--max-tokens", "1", "--endpoint", address)
    assert pdserve("generate", "x", *flags, *more).returncode == 0
    request = requests[-1]
    params = request.sampling
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.5, 7, 0.25, 0.125, 9)
    assert (list(request.stop), params.ignore_eos) == (["a", "b"], True)


def test_several_continuations_are_printed_one_by_one(pdserve: Command, address: str) -> None:
    ended = pdserve("generate", "x", "--n", "2", "--max-tokens", "2", "--endpoint", address)
    assert ended.stdout == "[0]  1 2\n[1]  1 2\n"


def test_json_holds_all_of_the_answer_and_numbers_are_numbers(pdserve: Command, address: str) -> None:
    ended = pdserve("generate", "x", "--json", "--max-tokens", "2", "--endpoint", address)
    answer = json.loads(ended.stdout)
    assert (answer["texts"], answer["token_ids"], answer["finish_reasons"]) == ([" 1 2"], [[0, 1]], ["length"])
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 0}
    assert answer["ledger"]["handoff_bytes"] == 2_500_000
    assert answer["request_id"] == "abc"


def test_a_refused_request_is_one_clear_line(pdserve: Command, address: str) -> None:
    ended = pdserve("generate", "x", "--max-tokens", "13", "--endpoint", address)
    assert ended.returncode == 1
    assert ended.stderr == f"pdserve: {address}: INVALID_ARGUMENT: max_tokens: 13 brings bad luck\n"


def test_an_endpoint_that_is_not_there_is_one_clear_line(pdserve: Command) -> None:
    ended = pdserve("generate", "x", "--endpoint", "127.0.0.1:1")
    assert ended.returncode == 1
    assert ended.stderr.startswith("pdserve: 127.0.0.1:1: UNAVAILABLE: ")
    assert ended.stderr.count("\n") == 1


def test_status_of_an_endpoint_is_what_it_tells_everybody(pdserve: Command, address: str) -> None:
    assert pdserve("status", "--endpoint", address).stdout.splitlines()[0] == f"{address}: serving"
    told = json.loads(pdserve("status", "--json", "--endpoint", address).stdout)
    assert (told["serving"], [model["name"] for model in told["models"]]) == (True, ["counting"])
    assert pdserve("status", "--endpoint", "127.0.0.1:1").returncode == 1
    refused = pdserve("status", "--watch", "--endpoint", address)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def test_chat_once_sends_the_system_message_first(pdserve: Command, address: str, requests: Requests) -> None:
    ended = pdserve("chat", "--once", "hi", "--system", "be brief", "--max-tokens", "3", "--endpoint", address)
    assert (ended.stdout, ended.stderr) == (" 1 2 3\n", f"{LEDGER}\n")
    messages = [(message.role, message.content) for message in requests[-1].chat.messages]
    assert messages == [("system", "be brief"), ("user", "hi")]


def test_chat_remembers_what_was_said_until_the_input_ends(
    pdserve: Command, address: str, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    assert pdserve("chat", "--max-tokens", "2", "--endpoint", address).returncode == 0
    messages = [(message.role, message.content) for message in requests[-1].chat.messages]
    assert messages == [("user", "one"), ("assistant", " 1 2"), ("user", "two")]


def test_a_refused_turn_says_why_and_the_conversation_goes_on(
    pdserve: Command, address: str, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\nunlucky\ntwo\n"))
    ended = pdserve("chat", "--max-tokens", "2", "--endpoint", address)
    messages = [(message.role, message.content) for message in requests[-1].chat.messages]
    assert messages == [("user", "one"), ("assistant", " 1 2"), ("user", "two")]
    assert "INVALID_ARGUMENT: messages: unlucky" in ended.stderr
    assert ended.stdout.count(" 1 2\n") == 2
    assert ended.returncode == 1  # whoever piped the messages in has not read why


def test_bench_measures_every_workload_and_writes_json(
    pdserve: Command, address: str, requests: Requests, tmp_path: Path
) -> None:
    results = tmp_path / "results.json"
    workloads = ("--workload", "4x5x6", "--workload", "2x3x13", "--request-rate", "200", "--goodput", "ttft:60000")
    ended = pdserve("bench", *workloads, "--json", str(results), "--endpoint", address)
    assert ended.returncode == 1
    assert ended.stderr == "pdserve: requests failed: 2x3x13: 2 INVALID_ARGUMENT\n"
    counting, refused = json.loads(results.read_text())["runs"]
    assert (counting["num_requests"], counting["failures"], counting["attainment"]) == (4, {}, 1.0)
    assert counting["output_tokens_per_s"] == pytest.approx(24 / counting["duration_s"])
    assert counting["handoff_bytes"] == 4 * 2_500_000
    assert (refused["failures"], refused["attainment"]) == ({"INVALID_ARGUMENT": 2}, 0.0)
    assert "4x5x6" in ended.stdout
    assert "2 INVALID_ARGUMENT" in ended.stdout
    sent = requests[-1]
    assert (len(sent.token_ids.ids), sent.sampling.temperature, sent.sampling.ignore_eos) == (3, 0.0, True)
    assert sent.slo.ttft_ms == 60000
    assert not sent.slo.HasField("tpot_ms")
    tenants = [request.tenant for request in requests[-6:]]
    assert len(set(tenants[:4])) == len(set(tenants[4:])) == 1
    assert tenants[0] != tenants[-1]  # an earlier run's prefixes are not found again


def test_bench_without_a_command_of_its_own_sends_load(pdserve: Command) -> None:
    assert pdserve("bench", "load", "0x4").stderr == pdserve("bench", "0x4").stderr
    assert "overload" in pdserve("bench", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("bench", "--endpoint", "h:1"), "--workload is needed"),
        (("bench", "--workload", "0x4"), "0x4"),
        (("status", "--admin", "h:1"), "--secret-file"),
        (("down", "nobody"), "no cluster named 'nobody' runs here"),
        (("logs", "nobody"), "nobody: no logs of any process are here"),
        (("generate", "x", "--name", "nobody"), "pdserve up"),
        (
            ("up", "/", "--internal-host", "256.0.0.1"),
            "--internal-host: cannot listen on 256.0.0.1: the host is not known here",
        ),
        (("keys", "new", "a b"), "TENANT: 'a b' is refused"),
        (("generate", "a\udcff", "--endpoint", "h:1"), "PROMPT: 'a\\udcff' is not UTF-8"),
        (("generate", "x", "--stop", "\udcff", "--endpoint", "h:1"), "--stop: '\\udcff' is not UTF-8"),
        (("chat", "--once", "\udcff", "--endpoint", "h:1"), "--once: '\\udcff' is not UTF-8"),
        (("router",), "--model: is required"),
        (("worker", "--model", "m", "--page-size", "0"), "--page-size: 0"),
        (("worker", "--config", "/nowhere.yaml"), "/nowhere.yaml"),
        (("models", "fetch", "gpt-9"), "gpt-9"),
        (("up", "gpt-9"), "gpt-9"),
        (("up", "--prefill", "0", "/"), "--prefill: 0"),
    ],
)
def test_what_cannot_be_is_refused_with_status_2_and_one_line(
    pdserve: Command, arguments: tuple[str, ...], part: str
) -> None:
    ended = pdserve(*arguments)
    assert ended.returncode == 2
    assert ended.stderr.startswith("pdserve: ")
    assert part in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        *(("generate", flag, "-1") for flag in ("--max-tokens", "--top-k", "--seed", "--n")),
        *(("generate", flag, str(2**64)) for flag in ("--max-tokens", "--top-k", "--seed", "--n")),
        *(("up", flag, value) for flag in ("--router-port", "--http-port") for value in ("-1", "65536")),
    ],
)
def test_a_number_that_no_request_and_no_port_can_have_is_refused_by_the_name_of_its_flag(
    pdserve: Command, command: str, flag: str, value: str
) -> None:
    ended = pdserve(command, "/", flag, value)
    assert ended.returncode == 2
    assert f"'{flag}'" in ended.stderr


def test_a_host_that_no_certificate_can_name_is_refused(pdserve: Command, tmp_path: Path) -> None:
    ended = pdserve("certs", str(tmp_path), "--host", "\N{LATIN SMALL LETTER E WITH ACUTE}.example")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith("pdserve: --host: ")


def test_what_cannot_be_written_to_a_terminal_ends_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", narrow)
    monkeypatch.setattr(sys, "argv", ["pdserve", "--version"])
    with pytest.raises(SystemExit):
        main()
    narrow.write("\N{SNOWMAN}")


def test_a_cluster_goes_on_where_nobody_reads_its_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with suppress(BrokenPipeError), os.fdopen(writing, "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        terminal = Terminal()
        terminal.notice("one")
        terminal.notice("two")


def test_without_a_terminal_a_step_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    with terminal.loading():
        terminal.listener("tests").on_status(admin.ClusterStatus(workers=[admin.WorkerStatus()]))
    assert capsys.readouterr().err == "starting processes\n"


def test_a_notice_that_finds_the_disk_full_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stderr", FullDisk())
    terminal = Terminal()
    terminal.notice("one")
    terminal.notice("two")
    assert written == ["one\n", "two\n"]


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    assert "a\x1b[2Jb\r\n\t\x9b".translate(VISIBLE) == "a\\x1b[2Jb\\x0d\n\t\\x9b"


def test_a_refusal_is_found_inside_task_groups() -> None:
    refusal = ConfigError("page_size: 3 is refused")
    assert first_of(ExceptionGroup("a", [OSError(), ExceptionGroup("b", [refusal])]), ConfigError) is refusal
    assert first_of(ExceptionGroup("a", [OSError(), ExceptionGroup("b", [KeyError()])]), ConfigError) is None


def test_what_the_operating_system_refuses_is_one_line_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    command = [sys.executable, "-P", "-m", "pdserve", "up", str(tmp_path)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(file)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (
        1,
        f"pdserve: cannot make {file}/pdserve/default: Not a directory; "
        "set XDG_RUNTIME_DIR to a folder that this user can write to\n",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "says"),
    [
        ("ro", "Read-only file system; set XDG_RUNTIME_DIR"),
        ("size=4k", "No space left on device; make room there, or set"),
    ],
)
def test_a_folder_that_takes_no_cluster_is_named_with_what_helps(tmp_path: Path, size: str, says: str) -> None:
    fill = ["sh", "-c", 'touch "$0/full"; head -c 4096 /dev/zero > "$0/full"; exec "$@"', str(tmp_path)]
    command = [*mounted(size, tmp_path), *fill, sys.executable, "-P", "-m", "pdserve", "up", str(tmp_path)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    said = ended.stderr.splitlines()[-1]
    assert said.startswith(f"pdserve: cannot make {tmp_path}/pdserve")
    assert says in said


def test_a_state_that_cannot_be_read_is_not_taken_for_none(
    pdserve: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "pdserve" / "default" / "state.json"
    path.mkdir(parents=True)
    assert pdserve("status").stderr == f"pdserve: {path}: cannot be read: Is a directory\n"


def test_version_is_the_packages(pdserve: Command) -> None:
    assert pdserve("--version").stdout == f"pdserve {package.__version__}\n"


def test_the_schema_of_each_process_is_printed(pdserve: Command) -> None:
    for process in ("router", "worker", "autoscaler", "cluster"):
        assert json.loads(pdserve("config", "schema", process).stdout)["additionalProperties"] is False


def test_models_are_listed_with_their_licence(pdserve: Command) -> None:
    assert "smollm2-135m-instruct  (Apache-2.0" in pdserve("models", "list").stdout


def processor_s(code: str) -> float:
    """Run a program; return its processor time: other tests may hold the cores."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-P", "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_is_quick_and_loads_neither_torch_nor_grpc() -> None:
    code = (
        "import sys\n"
        "from pdserve.cli.app import main\n"
        "sys.argv = ['pdserve', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'grpc', 'numpy', 'tokenizers', 'transformers', 'uvloop'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    libraries_s = min(processor_s("import typer, pydantic") for _ in range(3))
    assert min(processor_s(code) for _ in range(3)) < 8 * libraries_s  # a machine may be slow


def test_a_directory_keeps_its_whole_name_and_a_file_loses_gguf_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen2.5-0.5B-Instruct").mkdir()
    (tmp_path / "Qwen2.5-0.5B-Q4.gguf").touch()
    (tmp_path / "Qwen2.5-0.5B").touch()
    names = [model_name(given) for given in ("./Qwen2.5-0.5B-Instruct", "./Qwen2.5-0.5B-Q4.gguf", "Qwen2.5-0.5B")]
    assert names == ["Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Q4", "Qwen2.5-0.5B"]
    assert model_name(".") == tmp_path.name
    assert model_name("smollm2-135m-instruct") == "smollm2-135m-instruct"  # the catalog's


@pytest.mark.parametrize("words", [("role", "decode-0", "mixed"), ("drain", "decode-0")])
def test_a_worker_of_a_cluster_that_does_not_run_is_asked_for_nothing(words: tuple[str, ...], pdserve: Command) -> None:
    done = pdserve(*words, "--name", "nowhere")
    assert done.returncode == 2
    assert done.stderr == "pdserve: no cluster named 'nowhere' runs here: start one with `pdserve up`\n"


def test_a_role_that_there_is_not_is_refused(pdserve: Command) -> None:
    done = pdserve("role", "decode-0", "both")
    assert done.returncode == 2
    assert "'both' is not one of" in " ".join(done.stderr.split())
