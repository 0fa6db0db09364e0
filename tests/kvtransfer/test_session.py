"""What a capability covers, and of which hand-offs digests are checked."""

from itertools import combinations

from pdserve.ids import Attempt, Generation, PageId, RequestId
from pdserve.kvtransfer.session import CAPABILITY_BYTES, SAMPLED_ONE_IN, DigestPolicy, HandoffKey, mint_capability

KEY = HandoffKey(RequestId(b"r" * 16), Attempt(1))
PAGES, GENERATIONS = (PageId(3), PageId(1)), (Generation(5), Generation(2**40))


def keys(count: int) -> list[HandoffKey]:
    return [HandoffKey(RequestId(number.to_bytes(16)), Attempt(number % 3)) for number in range(count)]


def test_a_capability_is_another_for_another_process_hand_off_page_or_generation() -> None:
    minted = [
        mint_capability(b"secret", KEY, PAGES, GENERATIONS),
        mint_capability(b"another", KEY, PAGES, GENERATIONS),
        mint_capability(b"secret", HandoffKey(RequestId(b"s" * 16), Attempt(1)), PAGES, GENERATIONS),
        mint_capability(b"secret", HandoffKey(KEY.request_id, Attempt(2)), PAGES, GENERATIONS),
        mint_capability(b"secret", KEY, PAGES[::-1], GENERATIONS),
        mint_capability(b"secret", KEY, PAGES, GENERATIONS[::-1]),
        mint_capability(b"secret", KEY, PAGES, (Generation(6), GENERATIONS[1])),
        mint_capability(b"secret", KEY, PAGES[:1], GENERATIONS[:1]),
    ]
    assert all(one != other for one, other in combinations(minted, 2))
    assert {len(capability) for capability in minted} == {CAPABILITY_BYTES}


def test_digests_are_checked_always_never_or_of_one_hand_off_in_so_many() -> None:
    assert all(DigestPolicy.ALWAYS.checks(key) for key in keys(100))
    assert not any(DigestPolicy.OFF.checks(key) for key in keys(100))
    num_checked = sum(DigestPolicy.SAMPLED.checks(key) for key in keys(16_000))
    assert 0.9 * 16_000 / SAMPLED_ONE_IN < num_checked < 1.1 * 16_000 / SAMPLED_ONE_IN


def test_a_sampled_hand_off_is_the_same_one_whoever_asks() -> None:
    checked = [number for number, key in enumerate(keys(64)) if DigestPolicy.SAMPLED.checks(key)]
    assert checked == [23, 32, 34]
