"""A browser without a window, where one starts on this machine."""

import shutil
import subprocess
import tempfile

NAMES = ("chromium", "chromium-browser", "google-chrome")
LIMIT = 300  # seconds for a page, on a busy machine


def command(browser: str, profile: str) -> list[str]:
    """``profile``: a folder of the browser's own."""
    return [browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]


def find() -> tuple[str | None, str]:
    """The browser, or None and why there is none: some machines have one that does not start."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        return None, f"none of {', '.join(NAMES)} is here. Debian: apt-get install chromium"
    with tempfile.TemporaryDirectory() as profile:
        try:
            done = subprocess.run(
                [*command(browser, profile), "--dump-dom", "about:blank"], capture_output=True, text=True, timeout=LIMIT
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, f"{browser} does not start: {error}"
    if done.returncode == 0 and "<html" in done.stdout:
        return browser, ""
    said = done.stderr.strip().splitlines()
    return None, f"{browser} does not start: exit code {done.returncode}, {said[-1] if said else 'without a word'}"
