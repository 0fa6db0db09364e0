"""What a simulated router's predictions begin with, and whether it corrects them."""

from pdserve.capacity.shape import Shape
from pdserve.perfmodel.curve import StepCosts
from pdserve.perfmodel.margin import Bias, Margin
from pdserve.router.events import Role
from pdserve.router.forecast import Forecast


class _NeverWidened(Margin):
    """Takes each prediction at its word."""

    def observe(self, predicted_s: float, observed_s: float) -> None:
        del predicted_s, observed_s


class _NeverBiased(Bias):
    """The same of its bias."""

    def observe(self, predicted_s: float, observed_s: float) -> None:
        del predicted_s, observed_s


def new_forecast(costs: dict[Role, StepCosts], shape: Shape) -> Forecast:
    """Return the forecast of a router that has seen nothing yet."""
    forecast = Forecast(costs, knows_arrivals=shape.knows_arrivals)
    if not shape.corrects:
        forecast.ttft_margins = forecast.tpot_margins = dict.fromkeys((True, False), _NeverWidened())
        forecast.ttft_bias = forecast.tpot_bias = dict.fromkeys((True, False), _NeverBiased())
    return forecast
