"""Sphinx's settings of `make docs`."""

import nccl_ep

project = "nccl_ep"
version = release = nccl_ep.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
html_theme = "furo"
html_title = f"nccl_ep {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False

# Links to headings, with the anchors that a repository's page has for them. A link that leads nowhere is a warning, and
# a warning is an error in `make docs`.
myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
napoleon_use_ivar = True
napoleon_custom_sections = [("Returns", "params_style")]  # several names, as of arguments
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
