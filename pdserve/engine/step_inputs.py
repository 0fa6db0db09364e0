"""What a step's tokens are to kernels on a device: numbers, padded to the size of a captured step."""

import numpy as np
import numpy.typing as npt

from pdserve.engine.batch import Batch, PoolShape
from pdserve.kernels.staging import padded

Ints32 = npt.NDArray[np.int32]


def step_inputs(batch: Batch, pool: PoolShape, size: int) -> list[Ints32]:
    """Return token ids, positions, and slots in each group of layers, of `size` tokens.

    K and V of padding go to a slot past the last one.
    """
    inputs = [padded(batch.token_ids, (size,)), padded(batch.positions, (size,))]
    for group, page_size in enumerate((pool.page_size, *pool.other_page_sizes)):
        of = batch.of_group(group)
        inputs.append(padded(of.pages * page_size + of.slots, (size,), pool.num_pages * page_size))
    return inputs
