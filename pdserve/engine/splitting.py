"""Continuations that share their prompt's pages. Pure."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from pdserve.engine.pages import PagePool
from pdserve.engine.sequence import Sequence
from pdserve.sampling import SampledToken


def split(pool: PagePool, sequence: Sequence, tails: Iterable[tuple[int, Seq[SampledToken]]]) -> list[Sequence]:
    """Return a sequence for each (index, tokens that follow), all of which share the pages of this one.

    The first takes over its hold on them; without tails it keeps its pages. A shared page is copied before one of
    them writes into it.
    """
    children: list[Sequence] = []
    for index, tokens in tails:
        if children:
            pool.share(sequence.pages)
        child = Sequence(
            job=sequence.job,
            indices=(index,),
            tokens=list(sequence.tokens),
            order=sequence.order,
            computed=sequence.computed,
            pages=list(sequence.pages),
            num_published=sequence.num_published,
            num_cached_tokens=sequence.num_cached_tokens,
            has_run=sequence.has_run,
            logprobs=list(sequence.logprobs),
        )
        for token in tokens:
            child.append(token)
        child.prefix.hashes += sequence.prefix.hashes
        children.append(child)
    if children:
        sequence.forget_pages()
    return children
