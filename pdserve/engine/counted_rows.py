"""What penalties count of each sequence: rows on the device, which live as long as their sequences do.

Invariant: when a token is sampled, its row has counted the prompt and all tokens of the answer before it, with the
guesses that it is sampled behind. The prompt is sent once. The sampler counts what it samples, so a step planned ahead
needs nothing of the host.

Where a step samples behind guesses, each of these samples has a row of its own. The last token that is kept was counted
into the row of its sample, which has all tokens before it. So that row serves the next step, which finds it by how many
tokens of the answer it has counted.

A sequence that needs rows takes those of the sequence whose rows were used longest ago. A sequence that has lost its
rows, or whose step is computed again, is counted anew.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from pdserve.base.errors import InvariantError
from pdserve.engine.step import SampleSpec, SequenceKey
from pdserve.kernels.sample import NO_COUNTS, Ragged, count
from pdserve.kernels.staging import Staging

Ints32 = npt.NDArray[np.int32]
_List = tuple[int, bool, Seq[int]]  # a row, whether its tokens are the answer's, and these


class CountedRows:
    """Rows of counts of the sequences that have penalties."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Set up rows for so many samples. More are added only if a single step needs them."""
        self.counts = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device)
        self._staging = Staging(device)
        self._free = list(range(num_rows))
        # Of sequences, those used longest ago first: rows by how many tokens of the answer they have counted, with the
        # ones that the step started last samples.
        self._rows: OrderedDict[SequenceKey, dict[int, int]] = OrderedDict()

    def take(self, specs: Seq[SampleSpec]) -> Ints32:
        """Bring the rows of a step's samples up to date; the sampler is to count each sample's token next.

        Returns each sample's row, NO_COUNTS where it has no penalties. Does not wait for the device.
        """
        places = _places(specs)
        self._make_room(sum(map(len, places.values())))
        kept = [self._kept(specs[of[0]]) for of in places.values()]  # before rows of others are taken
        slots, lists, behind = np.full(len(specs), NO_COUNTS, np.int32), list[_List](), list[_List]()
        copies = list[tuple[int, int]]()
        for (sequence, of), found in zip(places.items(), kept, strict=True):
            spec, slot = specs[of[0]], self._taken() if found is None else found
            if found is None:
                lists += _whole(slot, spec)
            own = [slot, *[self._taken() for _ in of[1:]]]
            slots[of] = own
            copies += [(slot, copy) for copy in own[1:]]
            behind += [(at, True, specs[n].output_ids[spec.index :]) for at, n in zip(own[1:], of[1:], strict=True)]
            self._rows[sequence] = {spec.index + number: at for number, at in enumerate(own, 1)}
        if lists:
            self._count(lists)
        if copies:
            sources, targets = (each.long() for each in self._staging.send(*np.array(copies).T))
            self.counts.index_copy_(0, targets, self.counts.index_select(0, sources))
            self._count(behind)
        return slots

    def _make_room(self, num_rows: int) -> None:
        num_before = len(self.counts)
        if num_rows > num_before:  # there may be no memory for more: then none are free either
            self.counts = torch.cat((self.counts, self.counts.new_zeros((num_rows - num_before, self.counts.shape[1]))))
            self._free += range(num_before, num_rows)

    def _kept(self, spec: SampleSpec) -> int | None:
        """Return the row that has counted all before a sample, if there is one; give up the sequence's others."""
        own = self._rows.pop(spec.sequence, {})
        slot = own.pop(spec.index, None)
        self._free += own.values()
        return slot

    def _taken(self) -> int:
        """Return a row that is free now. Those of this step's sequences are the last that others would get."""
        if not self._free:
            self._free += self._rows.popitem(last=False)[1].values()
        return self._free.pop()

    def _count(self, lists: Seq[_List]) -> None:
        """Count lists of tokens; a row whose prompt is among them is cleared first."""
        slots, are_output = (np.array([each[column] for each in lists], np.int32) for column in (0, 1))
        parts = [np.asarray(token_ids, np.int32) for _, _, token_ids in lists]
        cleared, *sent = self._staging.send(
            slots[are_output == 0], slots, are_output, np.concatenate(parts), np.cumsum([0, *map(len, parts)])
        )
        self.counts.index_fill_(0, cleared.long(), 0)
        count(self.counts, sent[0], sent[1], Ragged(sent[2], sent[3]))


def _places(specs: Seq[SampleSpec]) -> dict[SequenceKey, list[int]]:
    """Return the samples of each sequence with penalties: the one behind known tokens, then those behind guesses."""
    places: dict[SequenceKey, list[int]] = {}
    for place in sorted(range(len(specs)), key=lambda place: specs[place].index):
        if specs[place].params.has_penalties:
            of = places.setdefault(specs[place].sequence, [])
            if of and specs[place].index != specs[of[-1]].index + 1:
                raise InvariantError(f"a step samples tokens {specs[of[-1]].index} and {specs[place].index}")
            of.append(place)
    return places


def _whole(slot: int, spec: SampleSpec) -> list[_List]:
    """Return all that a row counts before a sample."""
    if spec.lacks_output:
        raise InvariantError(f"no row has counted {spec.index} tokens of {spec.sequence}, and the last is not known")
    return [(slot, False, spec.prompt_ids), (slot, True, spec.output_ids)]
