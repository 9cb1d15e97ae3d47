"""Pictures of four pages of the site, as a browser shows them. Without Chromium it says so, and is content.

python -m tools.site.screenshots SITE FOLDER
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PAGES = ("index", "docs/network", "reference/nccl_ep", "reference/c")
SIZE = "1600,1800"  # pixels
LIMIT = 300  # seconds for a page, on a busy machine


def main(site: Path, folder: Path) -> int:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"No screenshots of the site: none of {', '.join(BROWSERS)} is here. Debian: apt-get install chromium")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        path = folder / f"{page.replace('/', '_')}.png"
        path.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as profile:
            done = subprocess.run(
                [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={SIZE}",
                 f"--user-data-dir={profile}", f"--screenshot={path}", (site / f"{page}.html").resolve().as_uri()],
                timeout=LIMIT, capture_output=True, text=True,
            )  # fmt: skip
        if done.returncode or not path.is_file():
            print(f"{browser} made no picture of {page}.html: {done.stderr[-2000:]}", file=sys.stderr)
            return 1
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
