"""Doors for clients of other servers' gRPC APIs; each translates to one GenerateRequest and opens it at the intake."""
