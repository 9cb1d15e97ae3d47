"""tools/glibc_stubs.py: what is linked against the stubs starts from glibc 2.28 on, and finds its functions here."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

from tests import ROOT
from tools.glibc_stubs import find

SOURCE = """
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <dlfcn.h>
#include <filesystem>
#include <mutex>
#include <sstream>
#include <sys/stat.h>
#include <thread>
std::string& own_text() {
  thread_local std::string text;  // by __tls_get_addr, which is the loader's
  return text;
}
extern "C" int runs(int fd) {
  own_text() = "of this thread";
  if (own_text().empty()) return -5;
  std::mutex mutex;
  std::condition_variable told;
  bool done = false;
  std::thread other([&] { std::lock_guard lock(mutex); done = true; told.notify_one(); });
  std::unique_lock lock(mutex);
  told.wait(lock, [&] { return done; });
  // A wait on the steady clock ends in time, neither at once nor never.
  const auto begin = std::chrono::steady_clock::now();
  if (told.wait_for(lock, std::chrono::milliseconds(30), [] { return false; })) return -2;
  if (std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(30)) return -3;
  lock.unlock();
  other.join();
  std::ostringstream text;
  text << std::filesystem::path("/a/b").parent_path().string();
  if (text.str() != "/a" || std::atexit([] {}) != 0) return -4;
  struct stat found {};
  return fstat(fd, &found) == 0 && dlsym(nullptr, "malloc") != nullptr ? int(found.st_size) : -1;
}
"""


def test_a_library_wants_no_newer_symbols_and_runs(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools/glibc_stubs.py", tmp_path / "stubs"], check=True)
    (tmp_path / "one.cc").write_text(SOURCE)
    build = ["g++", "-std=c++20", "-shared", "-fPIC", tmp_path / "one.cc", ROOT / "cmake/glibc_2_28.cc"]
    subprocess.run([*build, f"-L{tmp_path}/stubs", "-Wl,--no-undefined", "-o", tmp_path / "one.so"], check=True)
    wanted = subprocess.run(["objdump", "-T", tmp_path / "one.so"], capture_output=True, text=True, check=True).stdout
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"\(GLIBC_([0-9.]+)\)", wanted)}
    assert versions and max(versions) <= (2, 28), versions
    libstdcxx = {int(found) for found in re.findall(r"GLIBCXX_3\.4\.([0-9]+)", wanted)}
    assert libstdcxx and max(libstdcxx) <= 24, libstdcxx
    unversioned = set(re.findall(r"\*UND\*\s+[0-9a-f]+\s+(\w+)$", wanted, re.MULTILINE))
    here = subprocess.run(["objdump", "-T", find("libc.so.6")], capture_output=True, text=True, check=True).stdout
    assert not unversioned & set(re.findall(r"(\w+)$", here, re.MULTILINE)), "an older libc has them not"
    with open(tmp_path / "one.cc") as file:
        assert ctypes.CDLL(str(tmp_path / "one.so")).runs(file.fileno()) == len(SOURCE)
