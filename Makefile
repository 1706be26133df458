# Every target sets up what it needs: a virtual environment, torch, the compiled extension. `make help` lists them.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
CUDA_TORCH ?= torch==2.14.1
ARGS   ?=
JOBS   ?= 2

BIN := .venv/bin
# Objects and stamps stay in build/ and .venv/: a second run compiles only what changed.
TORCH_STAMP := .venv/.torch-$(shell printf %s '$(TORCH)' | tr -c 'A-Za-z0-9.' _)
SOURCES := $(wildcard csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu) setup.py $(wildcard ckpt_ops/_compile*.py)
# The one instruction set that this machine will load, where all of them are not needed.
BEST := $(shell grep -qsw avx2 /proc/cpuinfo && echo avx2 || echo default)

ASAN := build/asan
library = $(shell $${CXX:-c++} -print-file-name=$(1))
# The sanitizer's run time must come first in the process; torch's own leaks are not ours to report.
ASAN_ENV = LD_PRELOAD="$(call library,libasan.so) $(call library,libstdc++.so.6)" ASAN_OPTIONS=detect_leaks=0 CKPT_OPS_SANITIZE=address

.PHONY: help demo test test-asan test-cuda-host cuda-check wheel-cuda lint bench clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@echo 'ARGS="..." is passed on to demo, test and bench; TORCH="torch==X" picks another torch, PYTHON another Python.'

demo: .venv/.built-best  ## trains a small GPT with torch's layers and with ours: time, memory, loss
	$(BIN)/python -m ckpt_ops demo $(ARGS)

test: .venv/.built  ## the tests, in JOBS processes
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

test-asan: .venv/.package  ## the op tests on an extension with the address sanitizer
	@echo "compiling the kernels with the address sanitizer: a minute or two, once"
	CKPT_OPS_SANITIZE=address CKPT_OPS_VARIANTS=$(BEST) $(BIN)/python setup.py -q build --build-base $(ASAN) --build-lib $(ASAN)/lib
	$(ASAN_ENV) CKPT_OPS_TEST_BACKENDS=cpu $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -o pythonpath="$(ASAN)/lib ." tests/ops $(ARGS)

test-cuda-host: .venv/.built-best  ## the CUDA kernels on the CPU: values, sanitizers, race checker (CUDA's headers suffice)
	CKPT_OPS_TEST_BACKENDS=cuda-host $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup tests/test_cuda_host.py tests/test_mask.py tests/ops $(ARGS)

cuda-check:  ## compiles every CUDA kernel for every target: registers, spills, shared memory (nvcc, no GPU)
	$(PYTHON) tests/cuda_host/cuda_check.py $(ARGS)

wheel-cuda:  ## a wheel with the CUDA kernels, built and installed in environments of its own (nvcc, 12 GB of disk, no GPU)
	$(PYTHON) tests/install/cuda_wheel.py build/wheel-cuda --torch "$(CUDA_TORCH)" $(ARGS)

lint: .venv/.package  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: .venv/.built-best  ## every op against its peers
	$(BIN)/python -m bench $(ARGS)

clean:  ## removes what was built, not .venv
	rm -rf build dist *.egg-info ckpt_ops/*.so ckpt_ops/_build_info.json .venv/.built .venv/.built-best

.venv/.python:
	$(PYTHON) -m venv .venv
	touch $@

$(TORCH_STAMP): .venv/.python
	$(BIN)/python -m pip install -q --no-compile "setuptools>=77" numpy ninja "$(TORCH)"
	rm -f .venv/.torch-* && touch $@

# An isolated build is pure Python, hence quick; the extension follows, compiled in place.
.venv/.package: $(TORCH_STAMP) pyproject.toml
	$(BIN)/python -m pip install -q --no-compile -e '.[dev]'
	touch $@

.venv/.built: .venv/.package $(SOURCES)
	@echo "compiling the kernels for every instruction set: a few minutes, once"
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@ .venv/.built-best

.venv/.built-best: .venv/.package $(SOURCES)
	@echo "compiling the kernels for $(BEST): a minute or two, once"
	CKPT_OPS_VARIANTS=$(BEST) $(BIN)/python setup.py -q build_ext --inplace
	touch $@
