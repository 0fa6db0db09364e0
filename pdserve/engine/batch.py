"""A step as arrays: what the model and attention need to know of a plan, built without a loop over tokens.

Chunks are sorted by query length, then by context, so that chunks which attention can treat alike lie side by side.
`order` has the place in the plan that each comes from. Where layers keep a state, the rows of a token and of the
guesses behind it lie in order: they are a chain.
"""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from pdserve.base.errors import InvariantError
from pdserve.engine.step import Chunk, Phase, SampleSpec, StepPlan, Targets
from pdserve.engine.verification import num_kept
from pdserve.protocol.pooling import Pooling

Ints = npt.NDArray[np.int64]

KNOWN = -1  # stands for no chunk of the previous step: the token is known


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The bounds of a plan's numbers."""

    num_pages: int
    page_size: int  # of the first group of layers
    vocab_size: int
    other_page_sizes: tuple[int, ...] = ()  # of each group after it
    has_states: bool = False  # the last group is one of states


@dataclass(frozen=True, slots=True)
class GroupPages:
    """Where K and V of a step lie, in one group of layers."""

    pages: Ints  # [num_tokens]: where a token's K and V go
    slots: Ints  # [num_tokens]: and in which slot of that page
    page_table: Ints  # [num_chunks, most pages]; rows are filled up with their own first page


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk whose tokens' logits score the tokens that follow."""

    place: int  # in the plan's chunks
    rows: slice  # its tokens in the batch that have a target
    targets: Targets


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """A chunk of whose hidden states a vector is made."""

    place: int  # in the plan's chunks
    rows: slice  # its tokens in the batch
    pooling: Pooling


@dataclass(frozen=True, slots=True)
class Chains:
    """A step as layers with a state see it: the rows of a token and the guesses behind it are one chunk again."""

    page_table: Ints  # [num_chains, most pages]
    query_lens: Ints  # [num_chains]
    kv_lens: Ints
    has_guesses: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's chunks, in batch order; one array entry per token, per chunk or per sample."""

    token_ids: Ints  # [num_tokens]
    positions: Ints  # [num_tokens]
    pages: Ints  # as `GroupPages`, of the first group
    slots: Ints
    query_lens: Ints  # [num_chunks]
    query_starts: Ints  # [num_chunks + 1]: a chunk's first token, and the end
    kv_lens: Ints  # [num_chunks]: the context, the chunk's own tokens included
    page_table: Ints
    order: Ints  # [num_chunks]: index into the plan's chunks
    samples: tuple[SampleSpec, ...]  # in batch order
    sample_rows: Ints  # [num_samples]: the token whose logits a sample is taken from
    sample_counts: Ints  # [num_chunks]
    previous: Ints  # [num_tokens]: the chunk of the previous step that samples this token, or KNOWN
    scored: tuple[ScoredChunk, ...]
    pooled: tuple[PooledChunk, ...] = ()
    others: tuple[GroupPages, ...] = ()  # of each group after the first
    chain_starts: Ints | None = None  # the first chunk of each chain, and the end, where layers keep a state

    def of_group(self, group: int) -> "Batch":
        """Return the batch as layers of a group see it."""
        if group == 0:
            return self
        of = self.others[group - 1]
        return replace(self, pages=of.pages, slots=of.slots, page_table=of.page_table)

    @property
    def has_guesses(self) -> bool:
        """Return whether states are to be kept behind right guesses alone."""
        return self.chain_starts is not None and len(self.chain_starts) <= len(self.query_lens)

    @property
    def chains(self) -> Chains:
        """Return the step as layers with a state see it."""
        firsts, lasts = self._chain_ends()
        lens = np.add.reduceat(self.query_lens, firsts)
        return Chains(self.others[-1].page_table[lasts], lens, self.kv_lens[lasts], lasts > firsts)

    def num_kept(self, sampled: Seq[int], stuck: Collection[int]) -> Ints | None:
        """Return how many tokens of each chain are final; None: all are, since there are no guesses.

        sampled: by sample; stuck: the samples that nothing can follow.
        """
        if not self.has_guesses:
            return None
        firsts, lasts = self._chain_ends()
        samples, kept = _offsets(self.sample_counts), np.add.reduceat(self.query_lens, firsts)
        for place in np.flatnonzero(lasts > firsts).tolist():
            first, last = int(firsts[place]), int(lasts[place])
            of = range(int(samples[first]), int(samples[last]) + 1)
            row = int(self.query_starts[first])
            guesses = self.token_ids[row + 1 : row + len(of)].tolist()
            kept[place] = num_kept(guesses, sampled[of.start : of.stop], [sample in stuck for sample in of])
        return kept

    def _chain_ends(self) -> tuple[Ints, Ints]:
        """Return the first chunk of each chain, and the last one."""
        assert self.chain_starts is not None, "layers keep a state"
        return self.chain_starts[:-1], self.chain_starts[1:] - 1

    @property
    def reads_all(self) -> bool:
        """Return whether hidden states of all tokens are needed."""
        return bool(self.scored) or any(each.pooling.reads_all for each in self.pooled)

    @property
    def last_rows(self) -> Ints:
        """Return the rows of samples, then the last row of each pooled chunk."""
        return np.concatenate((self.sample_rows, np.array([each.rows.stop - 1 for each in self.pooled], np.int64)))

    @property
    def needs_previous(self) -> bool:
        """Return whether a token is known only when the previous step is over."""
        return bool((self.previous != KNOWN).any())

    @property
    def first_samples(self) -> Ints:
        """Return [num_chunks]: for each of the plan's chunks, its first sample in batch order."""
        firsts = np.empty_like(self.order)
        firsts[self.order] = _offsets(self.sample_counts)[:-1]
        return firsts

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def of_chunks(self, of_samples: Mapping[int, str]) -> dict[int, str]:
        """Return texts about samples by the place of the sample's chunk in the plan."""
        if not of_samples:
            return {}
        chunks = np.repeat(self.order, self.sample_counts)
        return {int(chunks[sample]): text for sample, text in of_samples.items()}

    @classmethod
    def of(cls, plan: StepPlan, shape: PoolShape) -> "Batch":
        """Lay out the plan's chunks, at least one; InvariantError if the plan cannot be run."""
        given_lens = _lengths([chunk.token_ids for chunk in plan.chunks])
        starts = np.array([chunk.start for chunk in plan.chunks], dtype=np.int64)
        if shape.has_states:
            order, chain_starts = _chained(plan.chunks, given_lens, starts)
        else:
            order, chain_starts = np.lexsort((given_lens + starts, given_lens)), None
        chunks = [plan.chunks[index] for index in order]
        query_lens, starts = given_lens[order], starts[order]
        query_starts = _offsets(query_lens)
        kv_lens = starts + query_lens
        token_ids = _flat([chunk.token_ids for chunk in chunks])
        _check(chunks, token_ids, shape)
        chunk_of_token = np.repeat(np.arange(len(chunks)), query_lens)
        positions = np.arange(len(token_ids)) + (starts - query_starts[:-1])[chunk_of_token]
        sample_counts = _lengths([chunk.samples for chunk in chunks])
        tables = [[chunk.pages for chunk in chunks]]
        tables += [[chunk.other_pages[group] for chunk in chunks] for group in range(len(shape.other_page_sizes))]
        sizes = (shape.page_size, *shape.other_page_sizes)
        first, *others = [
            _group_pages(rows, kv_lens, chunk_of_token, positions, (size, shape.num_pages))
            for rows, size in zip(tables, sizes, strict=True)
        ]
        previous = [KNOWN if chunk.previous is None else chunk.previous for chunk in chunks]
        return cls(
            token_ids=token_ids,
            positions=positions,
            pages=first.pages,
            slots=first.slots,
            query_lens=query_lens,
            query_starts=query_starts,
            kv_lens=kv_lens,
            page_table=first.page_table,
            order=order,
            samples=tuple(chain.from_iterable(chunk.samples for chunk in chunks)),
            sample_rows=np.repeat(query_starts[1:] - 1, sample_counts),
            sample_counts=sample_counts,
            previous=np.array(previous, dtype=np.int64)[chunk_of_token],
            scored=_scored(plan, order, query_starts),
            pooled=_pooled(plan, order, query_starts),
            others=tuple(others),
            chain_starts=chain_starts,
        )


def _chained(chunks: Seq[Chunk], lengths: Ints, starts: Ints) -> tuple[Ints, Ints]:
    """Return the order of a batch with the rows of each chain in it side by side, and where chains begin."""
    continues = np.array([chunk.continues for chunk in chunks])
    is_behind = (np.diff(starts, prepend=starts[0]) == 1) & (lengths == 1) & (np.roll(lengths, 1) == 1)
    if (wrong := np.flatnonzero(continues & ~is_behind)).size:
        raise InvariantError(f"a guess at position {starts[wrong[0]]} that is not behind the chunk before it")
    firsts = np.flatnonzero(~continues)
    sizes = np.diff(firsts, append=len(chunks))
    kv_lens = lengths + starts
    by_chain = np.lexsort((kv_lens[firsts], sizes, lengths[firsts]))
    rows = [np.arange(firsts[chain], firsts[chain] + sizes[chain]) for chain in by_chain]
    return np.concatenate(rows), _offsets(sizes[by_chain])


def _scored(plan: StepPlan, order: Ints, query_starts: Ints) -> tuple[ScoredChunk, ...]:
    if all(chunk.targets is None for chunk in plan.chunks):
        return ()
    scored = []
    for place, start in zip(order.tolist(), query_starts[:-1].tolist(), strict=True):
        targets = plan.chunks[place].targets
        if targets is not None:
            scored.append(ScoredChunk(place, slice(start, start + len(targets.token_ids)), targets))
    return tuple(scored)


def _pooled(plan: StepPlan, order: Ints, query_starts: Ints) -> tuple[PooledChunk, ...]:
    if all(chunk.pooling is None for chunk in plan.chunks):
        return ()
    rows = zip(order.tolist(), query_starts[:-1].tolist(), query_starts[1:].tolist(), strict=True)
    of = [(place, slice(start, stop), plan.chunks[place].pooling) for place, start, stop in rows]
    return tuple([PooledChunk(place, part, pooling) for place, part, pooling in of if pooling is not None])


def _lengths(parts: Seq[Seq[object]]) -> Ints:
    return np.array([len(part) for part in parts], dtype=np.int64)


def _offsets(lengths: Ints) -> Ints:
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))


def _flat(parts: Seq[Seq[int]]) -> Ints:
    return np.fromiter(chain.from_iterable(parts), dtype=np.int64)


def _page_table(rows: Seq[Seq[int]]) -> Ints:
    lengths = _lengths(rows)
    if lengths.min() == 0:
        raise InvariantError("a chunk without pages")
    first = np.array([row[0] for row in rows], dtype=np.int64)
    table = np.repeat(first[:, None], lengths.max(), axis=1)
    table[np.arange(lengths.max()) < lengths[:, None]] = _flat(rows)
    return table


def _group_pages(
    rows: Seq[Seq[int]], kv_lens: Ints, chunk_of_token: Ints, positions: Ints, pool: tuple[int, int]
) -> GroupPages:
    """Lay out one group's pages. pool: the tokens of its pages, and how many pages there are."""
    size, num_pages = pool
    for row, kv_len in zip(rows, kv_lens, strict=True):
        if len(row) * size < kv_len:
            raise InvariantError(f"{len(row)} pages of {size} tokens for a context of {kv_len}")
    table = _page_table(rows)
    _check_range("page", table, num_pages)
    return GroupPages(table[chunk_of_token, positions // size], positions % size, table)


def _check(chunks: Seq[Chunk], token_ids: Ints, shape: PoolShape) -> None:
    num_groups = 1 + len(shape.other_page_sizes)
    for chunk in chunks:
        if not chunk.token_ids or chunk.start < 0:
            raise InvariantError(f"a chunk of {len(chunk.token_ids)} tokens at position {chunk.start}")
        if len(chunk.other_pages) != num_groups - 1:
            raise InvariantError(f"{1 + len(chunk.other_pages)} groups of layers: this runner reads {num_groups}")
        if chunk.adapter:
            raise InvariantError("an adapter: this runner has none")
        if chunk.num_drafts:
            raise InvariantError(f"{chunk.num_drafts} guesses: this runner verifies none")
        if chunk.previous is not None and chunk.phase is not Phase.DECODE:
            raise InvariantError(f"tokens of a prompt after chunk {chunk.previous} of the previous step")
    _check_range("token id", token_ids, shape.vocab_size)


def _check_range(name: str, values: Ints, limit: int) -> None:
    if values.min() < 0 or values.max() >= limit:
        raise InvariantError(f"{name}s from {values.min()} to {values.max()}, the limit is {limit}")
