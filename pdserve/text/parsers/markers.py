"""Finds a marker in a text that comes in pieces."""


def split_at(text: str, marker: str) -> tuple[str, str, bool]:
    """Return what comes before a marker, what follows it, and whether it is there.

    Where it is not, the second part is the longest end of the text that could still become the marker.
    """
    before, found, after = text.partition(marker)
    if found:
        return before, after, True
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return text[:-length], text[-length:], False
    return text, "", False
