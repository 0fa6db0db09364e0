import os

os.environ["RAY_AUTH_MODE"] = "token"  # Ray reads it when it is imported
