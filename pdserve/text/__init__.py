"""Between text and token ids: tokenizing, detokenizing, stop strings, chat templates. Free of torch."""
