"""The router: the public endpoint, admission, placement, and the life of each request."""
