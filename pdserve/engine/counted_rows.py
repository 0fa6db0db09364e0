"""What penalties count of each sequence: rows on the device, which live as long as their sequences do.

Invariant: when a token is sampled, its sequence's row has counted the prompt and all tokens of the answer before it.
The prompt is sent once. The sampler counts what it samples, so a step planned ahead needs nothing of the host.

A new sequence takes the row that was used longest ago. A sequence that has lost its row, or whose step is computed
again, is counted anew.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pdserve.base.errors import InvariantError
from pdserve.engine.step import SampleSpec, SequenceKey
from pdserve.kernels.sample import NO_COUNTS, Ragged, count
from pdserve.kernels.staging import Staging

Ints32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Row:
    slot: int
    num_counted: int  # tokens of the answer, with the one that the step started last samples; UNCOUNTED: not the prompt


UNCOUNTED = -1
_List = tuple[int, bool, Seq[int]]  # a row, whether its tokens are the answer's, and these


class CountedRows:
    """Rows of counts of the sequences that have penalties."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Set up rows for `num_rows` sequences. More are added only if a single step needs them."""
        self.counts = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device)
        self._staging = Staging(device)
        self._rows: OrderedDict[SequenceKey, _Row] = OrderedDict()  # used longest ago first

    def take(self, specs: Seq[SampleSpec]) -> Ints32:
        """Bring the rows of a step's samples up to date; the sampler is to count each sample's token next.

        Returns each sample's row, NO_COUNTS where it has no penalties. Does not wait for the device.
        """
        penalized = [place for place, spec in enumerate(specs) if spec.params.has_penalties]
        slots, lists = np.full(len(specs), NO_COUNTS, np.int32), list[_List]()
        for place, row in zip(penalized, self._rows_of([specs[place].sequence for place in penalized]), strict=True):
            slots[place] = row.slot
            lists += _missing(row, specs[place])
        if lists:
            self._count(lists)
        return slots

    def _rows_of(self, sequences: Seq[SequenceKey]) -> list[_Row]:
        """Return the rows of a step's sequences, which no other sequence of the step gets."""
        rows, num_slots = self._rows, len(self.counts)
        if len(set(sequences)) < len(sequences):
            raise InvariantError("a step samples two tokens of a sequence with penalties: guesses are not counted")
        if len(sequences) > num_slots:
            more = self.counts.new_zeros((len(sequences) - num_slots, self.counts.shape[1]))
            self.counts = torch.cat((self.counts, more))
        for sequence in sequences:
            if sequence in rows:
                rows.move_to_end(sequence)
        for sequence in sequences:
            if sequence not in rows:
                is_full = len(rows) == len(self.counts)
                rows[sequence] = _Row(rows.popitem(last=False)[1].slot if is_full else len(rows), UNCOUNTED)
        return [rows[sequence] for sequence in sequences]

    def _count(self, lists: Seq[_List]) -> None:
        slots, are_output = (np.array([each[column] for each in lists], np.int32) for column in (0, 1))
        parts = [np.asarray(token_ids, np.int32) for _, _, token_ids in lists]
        cleared, *sent = self._staging.send(
            slots[are_output == 0],
            slots,
            are_output,
            np.concatenate(parts),
            np.cumsum([0, *map(len, parts)]),
        )
        self.counts.index_fill_(0, cleared.long(), 0)
        count(self.counts, sent[0], sent[1], Ragged(sent[2], sent[3]))


def _missing(row: _Row, spec: SampleSpec) -> list[_List]:
    """Return the tokens that a row lacks before a sample, the prompt first if the row is to be cleared; note them."""
    lists: list[_List] = []
    if not 0 <= row.num_counted <= spec.index:
        lists.append((row.slot, False, spec.prompt_ids))
        row.num_counted = 0
    if row.num_counted < spec.index:
        if spec.lacks_output:
            raise InvariantError(f"{row.num_counted} tokens of {spec.sequence} are counted, of {spec.index}")
        lists.append((row.slot, True, spec.output_ids[row.num_counted :]))
    row.num_counted = spec.index + 1
    return lists
