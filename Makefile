# make serve   the bundled example models on 127.0.0.1: HTTP 8000, gRPC 8001, metrics 8002
# make test    all tests
# make test-quick   those of the inner loop: most unit tests and the import arrows, in about a minute
# make check   lint, types, import arrows, generated files
# make docs    the documentation as a site, in site/; broken links fail
# make wheel   the compiled wheel, in dist/, tested in a separate environment (needs a C compiler)
# make test-compiled   the same tests with the compiled package (needs a C compiler)
# make test-lowest   tests of the protocol and of real servers with the lowest versions that pyproject.toml allows
# make fuzz    malformed input and random schedules, more cases than `make test`: CASES=1000000 of each kind, SEED=2 for others
# make audit   known vulnerabilities of the pinned dependencies, if a vulnerability service can be reached
# make protos   the generated messages in server/ortserve/_pb
# make reference   the generated pages and schemas
# make clean   remove .venv, build, dist and site
# make help    this text
# Each target first installs its requirements in .venv; only Python and make are required.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Tests of one file share servers, so one worker runs a file; the order starts long files early. Almost half of
# their time is waiting, so that four workers keep two processors busy.
WORKERS ?= $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) * 2 )))
PARALLEL ?= --numprocesses $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Set before the first import of ONNX Runtime, whose official wheels send telemetry from then on.
export ORT_DISABLE_TELEMETRY := 1

# Without bytecode on disk, each server in the tests compiles the whole package: 0.6 s of processor time.
unexport PYTHONDONTWRITEBYTECODE

# Of make fuzz; make test runs 3,000 cases. The time limit grows with their number.
CASES ?= 100000
SEED ?= 1

.PHONY: serve test test-quick docs wheel test-compiled test-lowest fuzz check audit protos reference clean help

serve: .venv/serve.done
	@locale -a | grep -qix 'en_US\.utf-\?8' || echo 'The locale en_US.UTF-8 is missing, which models with a' \
		'StringNormalizer need: apt-get install locales && localedef -i en_US -f UTF-8 en_US.UTF-8' >&2
	$(BIN)/ortserve serve --example

test: .venv/dev.done
	$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

# Unit tests that take long or need sessions of ONNX Runtime; the quick target leaves them out, with all other folders.
SLOW_UNIT_TESTS := rows engine device registry/load frontends/grpc/native batching/test_batcher_properties.py \
	batching/test_shared_threads.py telemetry/test_cost_reports.py app/test_watchdog.py

test-quick: .venv/dev.done
	$(BIN)/python -m pytest $(PARALLEL) $(SLOW_UNIT_TESTS:%=--ignore=tests/unit/%) tests/unit tests/repo/test_arrows.py $(PYTEST_ARGS)

# Without --quiet, which hides warnings from --strict.
docs: .venv/docs.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The fresh environment gets only the wheel and its requirements. -I keeps the source tree off its path.
wheel: .venv/dev.done
	rm -rf build dist .venv/wheel
	ORTSERVE_COMPILE=1 $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build
	$(BIN)/python -m venv .venv/wheel
	.venv/wheel/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		"$$(echo dist/ortserve-*.whl)[cpu]"
	.venv/wheel/bin/python -I tests/support/installed_wheel.py

# Installed in addition to the editable installation, and before it on the path of the tests and their servers. Level 0
# compiles in half of the time; images and wheels are built at level 3.
test-compiled: .venv/dev.done
	rm -rf build .venv/compiled
	ORTSERVE_COMPILE=1 ORTSERVE_COMPILE_LEVEL=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--target .venv/compiled .
	rm -rf build
	PYTHONPATH="$(CURDIR)/.venv/compiled" $(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

# Direct requirements get the lowest version with a wheel for this Python, indirect ones the newest.
LOWEST_EXTRAS := cpu,otel,stores,hub,extensions,tools,dev
LOWEST_TESTS := tests/contract $(addprefix tests/integration/test_,batching.py ensembles.py grpc_clients.py infer.py logs.py \
	metrics.py model_control.py optimize.py profile.py quantize.py repository.py stores.py tracing.py)

test-lowest: .venv/made
	rm -rf .venv/lowest
	$(PYTHON) -m venv .venv/lowest
	.venv/lowest/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	.venv/lowest/bin/python tests/support/lowest_versions.py > .venv/lowest/constraints.txt
	.venv/lowest/bin/uv pip install --quiet --python .venv/lowest --resolution lowest-direct --only-binary :all: \
		--no-binary ortserve --constraint .venv/lowest/constraints.txt --editable '.[$(LOWEST_EXTRAS)]'
	.venv/lowest/bin/python -m pytest $(PARALLEL) $(LOWEST_TESTS) $(PYTEST_ARGS)

fuzz: .venv/dev.done
	ORTSERVE_TEST_FUZZ_CASES=$(CASES) ORTSERVE_TEST_FUZZ_SEED=$(SEED) ORTSERVE_TEST_OPENAPI_EXAMPLES=30 \
	ORTSERVE_TEST_SCHEDULES=$(CASES) ORTSERVE_TEST_SEED=$$((($(SEED) - 1) * $(CASES))) \
		$(BIN)/python -m pytest $(PARALLEL) tests/fuzz tests/unit/batching/test_batcher_properties.py $(PYTEST_ARGS)

# mypy takes 40 s on one processor, meanwhile the tests use the others. A process in the background ignores Ctrl-C.
check: .venv/dev.done
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python protos/generate.py --check
	$(BIN)/mypy > .venv/types.log 2>&1 & types=$$!; trap "kill $$types 2> /dev/null" INT TERM; \
	$(BIN)/python -m pytest -q $(PARALLEL) $(PYTEST_ARGS) tests/repo; tests=$$?; \
	wait $$types; types=$$?; cat .venv/types.log; [ $$types -eq 0 ] && exit $$tests

audit: .venv/dev.done
	$(BIN)/python tests/support/audit.py

# Generated files that are committed.
protos: .venv/dev.done
	$(BIN)/python protos/generate.py

reference: .venv/dev.done
	$(BIN)/python -m ortserve.config.reference
	$(BIN)/python -m ortserve.registry.repository.triton_fields
	$(BIN)/python -m ortserve.telemetry.reference
	$(BIN)/python -m ortserve.tools.reference
	$(BIN)/python tests/support/onnx_node_verdicts.py
	$(BIN)/python tests/rows/verdicts.py
	$(BIN)/python deploy/monitoring/prometheusrule.py

clean:
	rm -rf .venv build dist site

help:
	@sed -n '/^#/!q; s/^# //p' Makefile

# Checked first, because pip reports an old Python as conflicting requirements, after minutes.
.venv/made:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"ortserve needs Python 3.11 or newer, \
	got {sys.version.split()[0]} from $(PYTHON); name another: make $(MAKECMDGOALS) PYTHON=python3.13")'
	$(PYTHON) -m venv .venv
	touch $@

.venv/serve.done: .venv/made pyproject.toml constraints.txt
	$(INSTALL) --editable '.[cpu]'
	touch $@

.venv/dev.done: .venv/made pyproject.toml constraints.txt
	$(INSTALL) --editable '.[cpu,otel,stores,tools,compile,dev,docs]'
	touch $@ .venv/serve.done .venv/docs.done

.venv/docs.done: .venv/made pyproject.toml constraints.txt
	$(INSTALL) --editable '.[docs]'
	touch $@
