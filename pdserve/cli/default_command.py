"""A group of commands, one of which runs where none is named."""

from typing import Any

from typer.core import TyperGroup


class DefaultLoad(TyperGroup):
    """Runs `load` where the first word is no command: `bench --workload W` is `bench load --workload W`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - click's, of a version typer chooses
        known = {*self.commands, *self.get_help_option_names(ctx)}
        return super().parse_args(ctx, args if args and args[0] in known else ["load", *args])
