# make demo     set up, build the extension, run the example
# make test     the quick tests                             make test-all  also slow tests, sanitizers, kernels, the wheel
# make kernels  compile the CUDA kernels, in build/kernels  make c         the C library, in build/dev
# make lint     formats, types, layers                      make format    formats all sources
# make tsan     C++ tests under ThreadSanitizer             make asan      ... AddressSanitizer and UBSan
# make bench    measure here                                make wheel     build and check dist/*.whl, for .venv
# make wheels   wheels for others: one for each torch and Python
# make tidy     clang-tidy on what needs neither CUDA nor torch
# make fuzz     ten minutes of random cases and arguments; FUZZ_SECONDS=60 FUZZ_SEED=7 choose
# make emulated the kernels of CUDA against the oracle, on an emulated GPU
# make newest   the quick tests that torch matters to, with the newest torch of PyPI, in .venv-newest
# make frameworks  tests with frameworks and libraries of formats themselves, in .venv-frameworks
# make docs     the documents as a site, in build/docs/site, with a reference of the Python and the C API
# make gpu      build, test and measure on a machine with GPUs and no network, with the packages it has
# make clean    remove what was built, keep .venv
#
# Set-up is on its own: .venv with the pinned requirements, and a CMake build in build/dev that puts the extension into
# nccl_ep/. Where no GPU is, it has no CUDA. NCCL_EP_CUDA=ON, OFF or AUTO (where nvcc is found) decides otherwise before
# the first build; afterwards: cmake build/dev -DNCCL_EP_CUDA=ON

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
export PATH := $(CURDIR)/.venv/bin:$(PATH)

PYTHON ?= python3
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc)
CMAKE_FLAGS ?=
ARCHS ?= 90a
NCCL_EP_CUDA ?= $(if $(wildcard /dev/nvidia[0-9]*),AUTO,OFF)
FUZZ_SECONDS ?= 600
FUZZ_SEED ?=
ctest := ctest --output-on-failure --parallel $(JOBS) --test-dir
cxx_files = $(shell find csrc tests -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo extension build c kernels test quick-cpp quick-python test-all lint format tidy tsan asan fuzz emulated \
    newest newest-extension frameworks docs bench gin wheel wheels gpu clean

demo: extension
	python examples/ll_moe_layer.py

# Tests wait more than they compute, so files of tests run beside one another, more of them than there are cores.
TEST_JOBS ?= $(shell echo $$((2 * $(JOBS) < 16 ? 2 * $(JOBS) : $(JOBS))))
quick_tests := -m pytest -m "not slow" -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

# C++ tests wait half of their time, so the Python tests begin beside them. What C++ tests say is shown where one fails.
test: export OMP_NUM_THREADS ?= 1
test: build
	$(MAKE) --no-print-directory --jobs 2 quick-cpp quick-python
	@sed -n '/tests passed/,$$p' build/dev/ctest.txt

quick-cpp:
	@$(ctest) build/dev --quiet --output-log build/dev/ctest.txt || { cat build/dev/ctest.txt; exit 1; }

# In a new clone one process compiles all that tests import, before each of several does.
quick-python:
	@test -d tests/__pycache__ || python -m pytest --collect-only -q > build/dev/collected.txt || true
	python $(quick_tests)

test-all: export NCCL_EP_TEST_ALL := 1
test-all: ARCHS := all
test-all: build kernels newest frameworks tsan asan fuzz emulated wheel
	$(ctest) build/dev
	python -m pytest

lint: .venv/ready
	clang-format --dry-run -Werror $(cxx_files)
	python tools/check_layers.py
	ruff check .
	ruff format --check .
	mypy

format: .venv/ready
	clang-format -i $(cxx_files)
	ruff check --fix --exit-zero .
	ruff format .

tidy: build/dev/build.ninja
	find csrc/{base,layout,runtime,cpu} -name '*.cc' | xargs -n 1 -P $(JOBS) clang-tidy --quiet -p build/dev

bench: extension
	python -m bench

# --- Set-up and build ---------------------------------------------------------------------------------------------------

# Python compiles what is imported, when it is: a third of what is installed. It has to keep that.
pip_flags := --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE

.venv/ready: requirements/dev.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install $(pip_flags) -r requirements/dev.txt
	echo '$(CURDIR)' > "$$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nccl_ep_source.pth"
	touch $@

# CMake configures again by itself when its files change, ninja builds what changed. Of CPU ranks alone nobody measures
# the speed: they are quick to build.
build/dev/build.ninja: .venv/ready
	cmake -S . -B build/dev -G Ninja -DNCCL_EP_CUDA=$(NCCL_EP_CUDA) -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python \
	    $(if $(filter OFF,$(NCCL_EP_CUDA)),-DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG") $(CMAKE_FLAGS)

build_in = cmake --build build/$(1) --parallel $(JOBS) $(if $(2),--target $(2))
say_without_cuda = @! grep -q '^NCCL_EP_CUDA:STRING=OFF' build/dev/CMakeCache.txt || \
    echo "Built for CPU ranks: no GPU is here, or NCCL_EP_CUDA is OFF. CUDA kernels are compiled by make kernels."

extension: build/dev/build.ninja
	$(call build_in,dev,_C)
	$(say_without_cuda)

build: build/dev/build.ninja
	$(call build_in,dev)
	$(say_without_cuda)

c: build/dev/build.ninja
	$(call build_in,dev,ncclep)

# Everything that stands on CUDA, for a machine that has nvcc and need not have a GPU; the extension stays in there.
# ARCHS: of kernels, as NCCL_EP_CUDA_ARCHS. tools/check_kernels.py holds their machine code against what is meant.
kernels: .venv/ready
	cmake -S . -B build/$@ -G Ninja -DNCCL_EP_CUDA=ON -DNCCL_EP_IN_PLACE=OFF "-DNCCL_EP_CUDA_ARCHS=$(ARCHS)" \
	    -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python $(CMAKE_FLAGS)
	$(call build_in,$@,_C ncclep cuda_tests)
	python tools/check_kernels.py build/$@/libep_cuda.a
	$(ctest) build/$@ -R 'Arena|exports'

# The C++ tests in build/$(1) under the sanitizer $(2).
define build_sanitized
	cmake -S . -B build/$(1) -G Ninja -DNCCL_EP_SANITIZE=$(2) -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS=-O1 \
	    -DNCCL_EP_CUDA=OFF -DNCCL_EP_BUILD_PYTHON=OFF -DNCCL_EP_BUILD_C_LIBRARY=OFF
	$(call build_in,$(1))
endef

tsan: sanitizer := thread
asan: sanitizer := address
tsan asan: .venv/ready
	$(call build_sanitized,$@,$(sanitizer))
	$(ctest) build/$@

# Half of the time for the C library's arguments, half for results against the oracle. Each prints its seed.
fuzz: extension
	$(call build_sanitized,asan,address)
	NCCL_EP_FUZZ_SEED=$(FUZZ_SEED) NCCL_EP_FUZZ_SECONDS=$$(($(FUZZ_SECONDS) / 2)) \
	    build/asan/ep_tests --gtest_filter='ApiFuzz.*'
	python -m tests.fuzz --seconds $$(($(FUZZ_SECONDS) / 2)) $(if $(FUZZ_SEED),--seed $(FUZZ_SEED))

# Extensions stay in build/emulated and build/newest: tests/support/other_build.py puts them in the place of nccl_ep's.
not_in_place := -DNCCL_EP_CUDA=OFF -DNCCL_EP_BUILD_TESTS=OFF -DNCCL_EP_BUILD_C_LIBRARY=OFF -DNCCL_EP_IN_PLACE=OFF

emulated: .venv/ready
	cmake -S . -B build/$@ -G Ninja -DNCCL_EP_EMULATED_GPU=ON -DNCCL_EP_LAB=ON $(not_in_place) \
	    -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python
	$(call build_in,$@)
	{ python tests/support/emulated.py -q -k "planted or chains" && python tests/support/emulated.py -q \
	    tests/ll/test_split_combine.py tests/ll/test_signals.py tests/ll/test_masks.py tests/deep_ep/test_low_latency.py \
	    tests/ll/test_extra.py tests/ll/test_all_weights.py tests/ht/test_signals.py tests/api/test_arrivals.py tests/network tests/contract \
	    tests/training/test_gradients.py tests/training/test_zero_weights.py && \
	    NCCL_EP_EMULATOR_GPUS=1 python tests/support/emulated.py -q tests/gpu/test_one_gpu_domains.py; } & \
	    python tests/support/emulated.py -q -k "not planted and not chains" && wait $$!

# The newest torch, of which an extension built against another is not one. (pip brings its CUDA packages too, without which
# torch cannot be imported: 2.9 GB to fetch, 5.4 GB on disk.) To look for a newer one: rm -r .venv-newest
# With Python 3.12 or newer where the machine has one, or uv fetches it: newer frameworks ask for it.
newest_tests := tests/api tests/torch_events tests/ll tests/ht tests/deep_ep tests/nvidia tests/training \
    tests/frameworks/test_token_switch.py tests/docs/test_doctor.py

.venv-newest/ready: requirements/newest.txt
	test -x .venv-newest/bin/python || "$$($(PYTHON) tools/newer_python.py || echo $(PYTHON))" -m venv .venv-newest
	.venv-newest/bin/python -m pip install $(pip_flags) -r requirements/newest.txt
	site="$$(.venv-newest/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	    ln -sf '$(CURDIR)/tests/support/other_build.py' "$$site/nccl_ep_other_build.py"; \
	    printf '%s\n' '$(CURDIR)' "import nccl_ep_other_build as o; o.use('$(CURDIR)/build/newest', target='newest')" \
	    > "$$site/nccl_ep_source.pth"
	touch $@

newest-extension: .venv/ready .venv-newest/ready
	cmake -S . -B build/newest -G Ninja $(not_in_place) -DPython_EXECUTABLE=$(CURDIR)/.venv-newest/bin/python
	$(call build_in,newest)

newest: newest-extension
	.venv-newest/bin/python $(quick_tests) $(newest_tests)

# Frameworks from PyPI, unchanged. They see the packages of .venv-newest, so that torch is not fetched once more, and the
# extension that is built for it. Of some that ask for much, only what calls deep_ep runs: they are installed alone.
.venv-frameworks/ready: requirements/frameworks.txt requirements/frameworks_alone.txt .venv-newest/ready
	test -x .venv-frameworks/bin/python || .venv-newest/bin/python -m venv .venv-frameworks
	site="$$(.venv-frameworks/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	    printf '%s\n' '$(CURDIR)' "$$(.venv-newest/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	    "import nccl_ep_other_build as o; o.use('$(CURDIR)/build/newest', target='newest')" > "$$site/nccl_ep_source.pth"
	.venv-frameworks/bin/python -m pip install $(pip_flags) -r requirements/frameworks.txt
	.venv-frameworks/bin/python -m pip install $(pip_flags) --no-deps -r requirements/frameworks_alone.txt
	touch $@

frameworks: newest-extension .venv-frameworks/ready
	.venv-frameworks/bin/python -m pytest tests/frameworks tests/api/test_formats.py

# Sphinx reads the docstrings of the extension's package, with the torch of .venv. A link that leads nowhere is an error.
.venv-docs/ready: requirements/docs.txt .venv/ready
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	site="$$(.venv-docs/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	    printf '%s\n' '$(CURDIR)' "$$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	    > "$$site/nccl_ep_source.pth"
	.venv-docs/bin/python -m pip install $(pip_flags) -r requirements/docs.txt
	touch $@

docs: extension .venv-docs/ready
	rm -rf build/docs
	.venv-docs/bin/python -m tools.site.pages build/docs/pages
	.venv-docs/bin/python -m sphinx -q -W --keep-going -c tools/site -b html build/docs/pages build/docs/site
	.venv-docs/bin/python -m tools.site.screenshots build/docs/site build/docs/screenshots
	@echo "wrote build/docs/site/index.html"

# Several domains over NCCL's own network between the GPUs of this machine, without a NIC. NCCL: folders with include/ and
# lib/libnccl.so.2, as nvidia/nccl of a wheel, separated by ":".
gin: export PYTHONPATH := $(CURDIR)
gin:
	test -n "$(NCCL)" || { echo "NCCL=FOLDER of NCCL 2.30.7, or of 2.31.2 or newer" >&2; exit 2; }
	for each in $(subst :, ,$(NCCL)); do test -s $$each/lib/libnccl.so.2 && test -s $$each/include/nccl.h || exit 2; done
	cmake -S . -B build/gpu -G Ninja -DNCCL_EP_CUDA=ON -DPython_EXECUTABLE="$$(command -v python3)" -DNCCL_EP_BUILD_TESTS=OFF \
	    -DNCCL_EP_GIN_NCCL_INCLUDE_DIRS="$(subst :,/include;,$(NCCL))/include" $(CMAKE_FLAGS)
	$(call build_in,gpu)
	NCCL_EP_TEST_GIN_NCCL="$$(echo $(NCCL) | sed 's,:,/lib/libnccl.so.2:,g; s,$$,/lib/libnccl.so.2,')" \
	    python3 -m pytest -m gpu tests/gpu/test_gin.py

# With the extension of build/dev, which is for .venv's torch.
wheel: extension
	rm -rf dist
	CMAKE_ARGS=-DNCCL_EP_PREBUILT=$(CURDIR)/build/dev python -m pip wheel --quiet --no-build-isolation --no-deps \
	    --wheel-dir dist .
	python tools/check_wheel.py dist/*.whl
	python tools/try_wheel.py dist/*.whl

wheels: .venv/ready
	rm -rf dist
	python tools/wheels.py

# No network and no .venv (one is used if it is there): the machine's python3 with torch, cmake, ninja and pytest.
gpu: export PYTHONPATH := $(CURDIR)
gpu:
	cmake -S . -B build/gpu -G Ninja -DNCCL_EP_CUDA=ON -DPython_EXECUTABLE="$$(command -v python3)" $(CMAKE_FLAGS)
	$(call build_in,gpu)
	$(ctest) build/gpu
	python3 -m pytest -m gpu || test $$? = 5  # 5: no such test
	python3 -m bench

clean:
	rm -rf build dist nccl_ep/*.so .mypy_cache .pytest_cache .ruff_cache
