"""Reads what models write beside plain text: tool calls and reasoning, as it comes."""
