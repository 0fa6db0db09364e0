"""OpenAI's Responses API over the same chats as its older API, with a store of responses and conversations.

Decides how items become a chat, in which order an answer's events come, and what is kept for how long. Begin at
`fields.py`. Must not know tokens, or how an answer is computed.
"""
