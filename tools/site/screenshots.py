"""Pictures of four pages of the site, as a browser shows them. Where no browser starts it says so, and is content.

python -m tools.site.screenshots SITE FOLDER
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from tools import browser

PAGES = ("index", "docs/network", "reference/nccl_ep", "reference/c")
SIZE = "1600,1800"  # pixels


def main(site: Path, folder: Path) -> int:
    chromium, why_not = browser.find()
    if chromium is None:
        print(f"No screenshots of the site: {why_not}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        path = folder / f"{page.replace('/', '_')}.png"
        path.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as profile:
            done = subprocess.run(
                [*browser.command(chromium, profile), "--hide-scrollbars", f"--window-size={SIZE}",
                 f"--screenshot={path}", (site / f"{page}.html").resolve().as_uri()],
                timeout=browser.LIMIT, capture_output=True, text=True,
            )  # fmt: skip
        if done.returncode or not path.is_file():
            print(f"{chromium} made no picture of {page}.html: {done.stderr[-2000:]}", file=sys.stderr)
            return 1
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
