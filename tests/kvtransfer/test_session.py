"""What a capability covers."""

from itertools import combinations

from pdserve.base.ids import Attempt, AttemptKey, Generation, PageId, RequestId
from pdserve.kvtransfer.session import CAPABILITY_BYTES, mint_capability

KEY = AttemptKey(RequestId(b"r" * 16), Attempt(1))
PAGES, GENERATIONS = (PageId(3), PageId(1)), (Generation(5), Generation(2**40))


def test_a_capability_is_another_for_another_process_hand_off_page_or_generation() -> None:
    minted = [
        mint_capability(b"secret", KEY, PAGES, GENERATIONS),
        mint_capability(b"another", KEY, PAGES, GENERATIONS),
        mint_capability(b"secret", AttemptKey(RequestId(b"s" * 16), Attempt(1)), PAGES, GENERATIONS),
        mint_capability(b"secret", AttemptKey(KEY.request_id, Attempt(2)), PAGES, GENERATIONS),
        mint_capability(b"secret", KEY, PAGES[::-1], GENERATIONS),
        mint_capability(b"secret", KEY, PAGES, GENERATIONS[::-1]),
        mint_capability(b"secret", KEY, PAGES, (Generation(6), GENERATIONS[1])),
        mint_capability(b"secret", KEY, PAGES[:1], GENERATIONS[:1]),
    ]
    assert all(one != other for one, other in combinations(minted, 2))
    assert {len(capability) for capability in minted} == {CAPABILITY_BYTES}
