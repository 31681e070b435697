# The commands of this repository. Each makes the environment that it needs; see `make help`.

PYTHON ?= python3
VENV ?=
TASK ?=
JOBS ?= 4
ARGS ?=
TORCH ?=
export VENV TASK TORCH

RUN = "$(PYTHON)" .ci/in_venv.py
# The documentation needs no torch, and has a small environment of its own.
RUN_DOCS = NO_MKDOCS_2_WARNING=1 VENV= TORCH= REQUIREMENTS=requirements-docs.txt $(RUN)

# What depends on the version of torch: the launch, checkpoints, apex_native and short runs of all tasks.
TESTS_OF_TORCH = tests/apex_native tests/package tests/engine tests/clusters/test_run_sh.py \
	tests/training/test_checkpoints_0_9.py tests/training/test_faults.py tests/training/test_short_run.py

.PHONY: help demo test test-torch slow weekly results lint docs format setup clean distclean

help: ## list the commands
	@awk -F ' *## *' '/^[a-z-]+:.*## / { sub(/:.*/, "", $$1); printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'PYTHON=python3.12   the interpreter to make the environment with (default: python3)'
	@echo 'VENV=folder         the environment (default: one for these requirements in ~/.cache)'
	@echo 'TASK=segmentation   what make demo trains (or contrastive; default: classification)'
	@echo 'JOBS=4              how many tests make test runs at once'
	@echo 'TORCH=2.6           the version of torch, in an environment of its own (default: the newest)'
	@echo 'ARGS="-k name"      further arguments of pytest'

demo: ## generate the default project, train it on its own data, show the result
	@$(RUN) python .ci/demo.py

# A crash of a worker ends the run: xdist can wait without end for the tests of a replaced one.
PYTEST = $(RUN) python -m pytest -n $(JOBS) --dist loadgroup --max-worker-restart=0

# Tests of whole runs belong to xdist groups, such as "train", "faults", and "short" for mostly one
# process for few steps. Each group has one worker, which keeps its fixtures. They often wait, so that
# four workers suit two cores.
test: ## run the tests, except the slow and weekly ones
	@$(PYTEST) $(ARGS)

test-torch: ## run the tests that depend on torch, with the version that TORCH names
	@$(RUN) python -c 'import torch; print("torch", torch.__version__)'
	@$(PYTEST) $(ARGS) $(TESTS_OF_TORCH)

slow: ## run the slow tests
	@$(PYTEST) -m "slow and not weekly" $(ARGS)

weekly: ## run the weekly tests, one after the other, for hours
	@$(RUN) python -m pytest -m weekly -rs $(ARGS)

# Fashion-MNIST is in Debian's package dataset-fashion-mnist; ARGS="--data DIR" names another folder.
results: ## train the recipes for Fashion-MNIST on a GPU, five seeds each, and print the table
	@$(RUN) python benchmarks/fashion_mnist.py $(ARGS)

# Without a cache, which ruff would put into the template.
lint: ## check style, types and shell scripts, change nothing
	@$(RUN) ruff check --no-cache .
	@$(RUN) ruff format --no-cache --check .
	@$(RUN) python .ci/check_types.py
	@$(RUN) shellcheck .ci/run '{{cookiecutter.project_slug}}/run.sh' \
		'{{cookiecutter.project_slug}}/launch'/*slurm.sbatch*

docs: ## build the documentation into build/site; a warning is an error
	@$(RUN_DOCS) mkdocs build --strict --quiet

format: ## put the Python files in order
	@$(RUN) ruff check --no-cache --fix .
	@$(RUN) ruff format --no-cache .

setup: ## only make the environment, and print where it is
	@$(RUN)

clean: ## remove what the commands above leave in this folder
	rm -rf build .hypothesis *.egg-info
	find . -name .git -prune -o -type d \( -name __pycache__ -o -name .pytest_cache \
		-o -name .ruff_cache \) -prune -exec rm -rf {} +

distclean: clean ## the same, and remove the environments
	@$(RUN) --remove
	@$(RUN_DOCS) --remove
