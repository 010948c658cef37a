# Every command of the project. Each sets up what it needs by itself, the first time it is called;
# without make, `bash .ci/task NAME` does the same.
.DEFAULT_GOAL := help
.PHONY: help run test test-all frameworks lint format bench recordings pictures faults fleet soak fuzz deploy generate alerts dashboards docs release lock clean

# Further arguments for the command behind a target, for example: make test ARGS="-k ledger"
ARGS ?=

help: ## Print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  ARGS="..." adds arguments: make run ARGS="--web.listen-address=:9999", make test ARGS="-k ledger"'
	@echo '  PYTHON=... chooses the interpreter: make test PYTHON=python3.12'

run: ## Serve this host's GPUs, or a recording where there is no driver, on port 10839
	@bash .ci/task run $(ARGS)

test: ## Run nearly all tests, with the tools that they need: about 4 minutes on two cores
	@bash .ci/task test $(ARGS)

test-all: ## Run every test, beside the real PyTorch, TensorFlow and JAX too
	@bash .ci/task test-all $(ARGS)

frameworks: ## Set up the real PyTorch, TensorFlow and JAX, for the tests that run them
	@bash .ci/task frameworks

lint: ## Check style, layout and types
	@bash .ci/task lint

format: ## Lay out the code and mend what the linter can mend by itself
	@bash .ci/task format

bench: ## Measure against the budget and against a peer; prints a table
	@bash .ci/task bench $(ARGS)

recordings: ## Judge the test recordings again, and write the page that each must give
	@bash .ci/task recordings

pictures: ## Photograph the live page anew, from a recording, for the documents
	@bash .ci/task pictures

faults: ## Plant faults in simulated hours, and print how well the alerts find them
	@bash .ci/task faults $(ARGS)

fleet: ## Measure what a fleet costs one Prometheus; prints a table
	@bash .ci/task fleet $(ARGS)

soak: ## Break everything for hours; prints tables
	@bash .ci/task soak $(ARGS)

fuzz: ## Feed the parsers and the web part with garbage, for long
	@bash .ci/task fuzz $(ARGS)

dashboards: ## Write the dashboards' JSON from dashboards/src
	@bash .ci/task dashboards $(ARGS)

deploy: ## Make what is made in deploy/: kustomize bases, manual page, shell completions
	@bash .ci/task deploy $(ARGS)

alerts: ## Write the alert rules from alerts/src and alerts/thresholds.yml, and the runbooks that the exporter serves
	@bash .ci/task alerts $(ARGS)

generate: ## Write every generated file anew: what follows from the declarations, documents, rules, dashboards
	@bash .ci/task generate

release: ## Build into dist/ what a release publishes, with digests, origin and list of contents
	@bash .ci/task release $(ARGS)

lock: ## Choose anew the versions that the image installs, and write their hashes
	@bash .ci/task lock $(ARGS)

docs: ## Write METRICS.md and its pages anew from the declared metrics and exporter/docs/src
	@bash .ci/task docs $(ARGS)

clean: ## Remove everything that the commands made
	@bash .ci/task clean
