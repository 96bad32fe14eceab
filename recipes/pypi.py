"""What the package index shows: the README with links that hold anywhere; run when the package is built."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z]+://|#)([^)]+)\)")


class Readme(MetadataHookInterface):
    """Makes the README's links absolute, below the project's address in `pyproject.toml`."""

    PLUGIN_NAME = "custom"

    def update(self, metadata):
        """Adds the README to the metadata."""
        home = metadata["urls"]["Repository"]

        def absolute(link):
            picture, words, path = link.groups()
            return f"{picture}{words}{home}/{'raw' if picture else 'blob'}/main/{path})"

        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": LINK.sub(absolute, text)}
