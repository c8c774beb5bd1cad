"""Pages and model cards from the Jinja2 templates in `templates/`."""

from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape


def render(template: str, /, **values: Any) -> str:
    """A template by name, filled with these values; those in HTML are escaped."""
    environment = Environment(
        loader=PackageLoader("graft"),
        autoescape=select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)
