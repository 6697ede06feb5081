# make serve   the bundled example models on 127.0.0.1: HTTP 8000, gRPC 8001, metrics 8002
# make test    all tests
# make check   lint, types, import arrows, generated files
# make docs    the documentation as a site, in site/; broken links fail
# make wheel   the compiled wheel, in dist/, tested in an environment of its own (needs a C compiler)
# make test-compiled   the same tests of the package as it is when it is compiled (needs a C compiler)
# make fuzz    bad input and schedules of batches, more than among all tests: CASES=1000000 of each kind, SEED=2 for others
# make audit   known vulnerabilities of the pinned dependencies, where a service can be asked
# Each makes what it needs in .venv first; only Python and make have to be there.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Tests of one file share servers, so a file is one worker's; long files come early as they are ordered.
PARALLEL ?= --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Before anything imports ONNX Runtime: its official wheels report to their maker from import on.
export ORT_DISABLE_TELEMETRY := 1

# Without bytecode on the disk each server that a test starts compiles the whole package: 0.6 s of processor time.
unexport PYTHONDONTWRITEBYTECODE

# Of make fuzz; among all tests there are 3,000 cases. The time that they may take grows with their number.
CASES ?= 100000
SEED ?= 1

.PHONY: serve test docs wheel test-compiled fuzz check audit protos reference clean

serve: .venv/serve.done
	@locale -a | grep -qix 'en_US\.utf-\?8' || echo 'The locale en_US.UTF-8 is missing, which models with a' \
		'StringNormalizer need: apt-get install locales && localedef -i en_US -f UTF-8 en_US.UTF-8' >&2
	$(BIN)/ortserve serve --example

test: .venv/dev.done
	$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

# Without --quiet, with which MkDocs does not count the warnings that --strict makes errors.
docs: .venv/docs.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The fresh environment gets the wheel and what it requires, nothing of the tests. -I keeps the source tree off its path.
wheel: .venv/dev.done
	rm -rf build dist .venv/wheel
	ORTSERVE_COMPILE=1 $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build
	$(PYTHON) -m venv .venv/wheel
	.venv/wheel/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		"$$(echo dist/ortserve-*.whl)[cpu]"
	.venv/wheel/bin/python -I tests/support/installed_wheel.py

# Beside the editable installation, and before it on the path of the tests and of the servers that they start. Level 1
# compiles in two thirds of the time; images are built at level 3.
test-compiled: .venv/dev.done
	rm -rf build .venv/compiled
	ORTSERVE_COMPILE=1 ORTSERVE_COMPILE_LEVEL=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--target .venv/compiled .
	rm -rf build
	PYTHONPATH=$(CURDIR)/.venv/compiled $(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

fuzz: .venv/dev.done
	ORTSERVE_TEST_FUZZ_CASES=$(CASES) ORTSERVE_TEST_FUZZ_SEED=$(SEED) \
	ORTSERVE_TEST_SCHEDULES=$(CASES) ORTSERVE_TEST_SEED=$$((($(SEED) - 1) * $(CASES))) \
		$(BIN)/python -m pytest $(PARALLEL) tests/fuzz tests/unit/batching/test_batcher_properties.py $(PYTEST_ARGS)

check: .venv/dev.done
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python protos/generate.py --check
	$(BIN)/python -m pytest -q tests/repo

audit: .venv/dev.done
	$(BIN)/python tests/support/audit.py

# Generated files that are committed.
protos: .venv/dev.done
	$(BIN)/python protos/generate.py

reference: .venv/dev.done
	$(BIN)/python -m ortserve.config.reference
	$(BIN)/python -m ortserve.config.schema
	$(BIN)/python -m ortserve.registry.repository.triton_fields
	$(BIN)/python -m ortserve.telemetry.reference
	$(BIN)/python tests/support/onnx_node_verdicts.py
	$(BIN)/python tests/rows/verdicts.py
	$(BIN)/python deploy/monitoring/prometheusrule.py

clean:
	rm -rf .venv build dist site

.venv/made:
	$(PYTHON) -m venv .venv
	touch $@

.venv/serve.done: .venv/made pyproject.toml constraints.txt
	$(INSTALL) --editable '.[cpu]'
	touch $@

.venv/dev.done: .venv/made pyproject.toml constraints.txt
	$(INSTALL) --editable '.[cpu,otel,compile,dev,docs]'
	touch $@ .venv/serve.done .venv/docs.done

.venv/docs.done: .venv/made pyproject.toml constraints.txt
	$(INSTALL) --editable '.[docs]'
	touch $@
