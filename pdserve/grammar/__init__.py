"""What the text of an answer has to match: checked before a request is admitted, and made token masks of by workers."""
