"""The documentation as a site: `make docs`."""

project = "Graft"
author = "the authors of Graft"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "Graft"
html_show_copyright = False
exclude_patterns = ["_build"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
