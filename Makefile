# The commands of this repository. Each makes the environment that it needs; see `make help`.

PYTHON ?= python3
VENV ?=
TASK ?=
JOBS ?= 2
ARGS ?=
export VENV TASK

RUN = "$(PYTHON)" .ci/in_venv.py

.PHONY: help demo test slow lint format setup clean distclean

help: ## list the commands
	@awk -F ' *## *' '/^[a-z]+:.*## / { sub(/:.*/, "", $$1); printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'PYTHON=python3.12   the interpreter to make the environment with (default: python3)'
	@echo 'VENV=folder         the environment (default: one for these requirements in ~/.cache)'
	@echo 'TASK=segmentation   what make demo trains (or contrastive; default: classification)'
	@echo 'JOBS=2              how many tests make test runs at once'
	@echo 'ARGS="-k name"      further arguments of pytest'

demo: ## generate the default project, train it on its own data, show the result
	@$(RUN) python .ci/demo.py

# Tests that train belong to the xdist group "train", or "short" if it is mostly one process for few
# steps: each group has one worker, which keeps its fixtures, and two cores suffice for both.
test: ## run the tests, except the slow ones
	@$(RUN) python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

slow: ## run the slow tests, one after the other
	@$(RUN) python -m pytest -m slow -rs $(ARGS)

# Without a cache, which ruff would put into the template.
lint: ## check style and shell scripts, change nothing
	@$(RUN) ruff check --no-cache .
	@$(RUN) ruff format --no-cache --check .
	@$(RUN) shellcheck .ci/run '{{cookiecutter.project_slug}}/run.sh' \
		'{{cookiecutter.project_slug}}/launch'/*slurm.sbatch*

format: ## put the Python files in order
	@$(RUN) ruff check --no-cache --fix .
	@$(RUN) ruff format --no-cache .

setup: ## only make the environment, and print where it is
	@$(RUN)

clean: ## remove what the commands above leave in this folder
	rm -rf build .hypothesis
	find . -name .git -prune -o -type d \( -name __pycache__ -o -name .pytest_cache \
		-o -name .ruff_cache \) -prune -exec rm -rf {} +

distclean: clean ## the same, and remove the environment
	@$(RUN) --remove
