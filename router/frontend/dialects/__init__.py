"""Services for clients of other servers' gRPC APIs. Each translates a request to a GenerateRequest for the intake."""
