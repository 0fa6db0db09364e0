"""The libraries that can move pages, each behind the same thread."""
