"""Sphinx's settings for the site; `make docs` builds it (build.py puts its sources together first)."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

import fedspeed  # noqa: E402

project = "fedspeed"
author = "The fedspeed maintainers"
copyright = "The fedspeed maintainers, Apache-2.0"
version = release = fedspeed.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_design", "house"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4
myst_dmath_double_inline = False
suppress_warnings = ["config.cache"]
nitpicky = True
smartquotes = False  # --out is an option, no dash

autodoc_typehints = "signature"
autodoc_default_options = {"show-inheritance": False}
autodoc_class_signature = "mixed"
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"fedspeed {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/icon.svg"
html_math_renderer = "mathml"
html_copy_source = False
html_show_search_summary = False  # it would fetch pages, which a browser refuses from disk
html_show_sourcelink = False
html_theme_options = {"top_of_page_buttons": []}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

if (HERE / "gallery").is_dir():
    extensions.append("sphinx_gallery.gen_gallery")
    sphinx_gallery_conf = {
        "examples_dirs": [str(HERE / "gallery")],
        "gallery_dirs": ["gallery"],
        "filename_pattern": r"\.py$",
        "ignore_pattern": r"__|/_",
        "abort_on_example_error": True,
        "download_all_examples": False,
        "show_memory": False,
        "show_signature": False,
        "min_reported_time": 1e9,
        "write_computation_times": False,
        "remove_config_comments": True,
        "parallel": False,
    }
