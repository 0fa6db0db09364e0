"""What both kinds of worker share: words between core and router, and the shell that drives a core."""
