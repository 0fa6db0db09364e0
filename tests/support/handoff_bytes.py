"""The bytes that hand-offs send of models with and without windows: by the formula, and counted between two workers.

    PYTHONPATH=tests/support:tests/simulator python tests/support/handoff_bytes.py

The workers' cores are real. Their engines compute hashes, in pages with as many tokens as those of the model have.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from joined_cores import ROUTER, VOCAB, AttentiveRunner, Joined, Node

from pdserve.base.ids import Attempt, Incarnation, Peer, RequestId, WorkerId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job
from pdserve.executor.layouts import describe_layout
from pdserve.kvtransfer import doors
from pdserve.model.config import ModelConfig
from pdserve.protocol.kvlayout import KvLayout
from pdserve.protocol.sampling import SamplingParams
from pdserve.worker.messages import Placed, Tokens

LENGTHS = (1024, 8192, 131_072)
PAGE_SIZE, STEP_TOKENS = 16, 2048


@dataclass(frozen=True)
class Model:
    """What decides the bytes of a model's KV."""

    name: str
    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    window: int | None = None
    ratio: int = 0  # layers with the window for each one without

    @cached_property
    def layout(self) -> KvLayout:
        kinds = ["sliding_attention"] * self.ratio + ["full_attention"]
        own = {"sliding_window": self.window, "layer_types": (kinds * self.num_layers)[: self.num_layers]}
        config = ModelConfig.from_hf(
            {
                "architectures": [self.architecture],
                "vocab_size": 512,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": self.num_layers,
                "num_attention_heads": self.num_kv_heads,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "max_position_embeddings": self.max_model_len,
                **(own if self.ratio else {}),
            }
        )
        return describe_layout(config, "", PAGE_SIZE, "bfloat16", "cpu")

    def pages_by_formula(self, length: int) -> int:
        """Return the pages of each group that end after the window of the next token begins, written out."""
        layout, pages = self.layout, -(-length // self.layout.page_size)
        for group in layout.others:
            assert group.window is not None
            pages += -(-length // group.page_size) - max(0, length - group.window + 1) // group.page_size
        return pages


MODELS = (
    Model("Llama 3.1 8B", "LlamaForCausalLM", 32, 8, 128, 131_072),
    Model("GPT-OSS 20B", "Gemma2ForCausalLM", 24, 8, 64, 131_072, 128, 1),  # its layers and heads; KV is the same
    Model("Gemma 2 9B", "Gemma2ForCausalLM", 42, 8, 256, 8192, 4096, 1),
    Model("Command R7B", "Cohere2ForCausalLM", 32, 8, 128, 131_072, 4096, 3),
    Model("Gemma 3 12B", "Gemma3ForCausalLM", 48, 8, 256, 131_072, 1024, 5),
)


class TwoWorkers(Joined):
    """A worker that computes a prompt, and one to which it goes. Both have as few pages as a prompt needs."""

    def __init__(self, layout: KvLayout, length: int) -> None:
        shapes, num_pages = layout.paging.shapes, layout.paging.most_pages(length + 2, STEP_TOKENS)
        nodes = {}
        for number, name in enumerate(("p", "d"), 1):
            runner = AttentiveRunner(num_pages, shapes[0].page_size, VOCAB, others=shapes[1:])
            limits = Limits(4, STEP_TOKENS, length + 2, frozenset())
            scheduler = Scheduler(KvCache(num_pages, layout.paging, None), limits)
            nodes[name] = Node(Peer(WorkerId(name), Incarnation(number)), scheduler, runner)
        super().__init__(nodes)
        self.num_pages_sent = 0
        self.tokens: list[int] = []

    def hand_off(self, length: int) -> None:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        job = Job(RequestId(bytes(16)), Attempt(0), [7 * i % VOCAB for i in range(length)], length, params, (0,))
        self.queue("d", Placed(ROUTER, job, 1e9, source=self.nodes["p"].peer))
        self.queue("p", Placed(ROUTER, job, 1e9, target=self.nodes["d"].peer, target_address="d"))
        while any(self.streams.values()) or any(self.step(name) for name in self.nodes):
            for name in [name for name, stream in self.streams.items() if stream]:
                self.deliver(*name)
        self.assert_nothing_held()

    def perform(self, worker: str, commands: list[object]) -> None:
        self.num_pages_sent += sum(len(each.src) for each in commands if isinstance(each, doors.StartCopy))
        super().perform(worker, commands)

    def report(self, worker: str, report: object) -> None:
        if isinstance(report, Tokens) and worker == "d":
            self.tokens += [token.token_id for token in report.tokens]


def sent_bytes(model: Model, length: int) -> int:
    """Return the bytes that a worker sends of a prompt, counted."""
    workers = TwoWorkers(model.layout, length)
    workers.hand_off(length)
    assert len(workers.tokens) == 2
    return workers.num_pages_sent * model.layout.page_bytes


def table(lengths: tuple[int, ...]) -> Iterator[str]:
    """Yield the lines of a table, without its head, for these lengths: they are sent."""
    for model in MODELS:
        layers = f"{model.window:,} tokens in {model.ratio} of {model.ratio + 1}" if model.window else "all"
        for length in (each for each in lengths if each <= model.max_model_len):
            whole = layout_bytes(model, length)
            formula = model.pages_by_formula(length) * model.layout.page_bytes
            found = " | ".join(f"{num_bytes / 2**20:,.1f}" for num_bytes in (whole, formula, sent_bytes(model, length)))
            yield f"| {model.name} | {layers} | {length:,} | {found} |"


def layout_bytes(model: Model, length: int) -> int:
    """Return the bytes of all pages of a prompt."""
    return model.layout.paging.num_pages(length) * model.layout.page_bytes


if __name__ == "__main__":
    print(*table(LENGTHS), sep="\n")  # noqa: T201
