"""Measurements on live clusters that are started for them: predictions, overload, the simulator beside them."""
