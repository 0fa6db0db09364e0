"""Anthropic's Messages API over the same chats as OpenAI's.

Decides how a conversation of content blocks becomes a chat, and how an answer becomes blocks again. Begin at
`fields.py`. Must not know tokens, or how an answer is computed.
"""
