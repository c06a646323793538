# `make help` lists the targets. Each target installs the packages that it needs on Debian as root; on other systems scripts/deps
# prints which to install.

CARGO ?= cargo
SCRIPTS = .ci/run $(wildcard scripts/* packaging/*/*.sh packaging/*/tests/*.sh packaging/initramfs/[hls]* packaging/debian/p* \
	tests/vm/guest/init tests/vm/host/*.sh)

.PHONY: help demo test fuzz vm-test dashboard-test lint bench book deb deps build deny soak mutants

help:
	@echo 'make demo   builds, makes a set with a slow disk and ext4, measures and checks it (2 minutes after the build)'
	@echo 'make test   every test'
	@echo 'make fuzz   every fuzz target for some seconds (fuzz/README.md)'
	@echo 'make vm-test   tests with a kernel in virtual machines: each reads what the other has written (25 minutes)'
	@echo 'make dashboard-test   the web dashboard in a headless Chromium; screenshots in target/dashboard'
	@echo 'make lint   formatting, clippy, documentation, shell scripts, rules of the repository (tidy), dependencies (make deny)'
	@echo 'make soak   tests that take too long for CI: AddressSanitizer, proofs, long fuzzing, the simulator (scripts/soak); SOAK="--seeds 2000000"'
	@echo 'make mutants   finds small changes of the engine that no test notices (hours; scripts/mutants); MUTANTS="--share 1/20 --minutes 60"'
	@echo 'make bench  benchmarks of the engine, and B1 to B9, which compare caches (hours); JOBS="B3" runs one of these'
	@echo 'make book   the guide for operators, in target/book'
	@echo 'make deb    a Debian package, in target/deb'
	@echo 'make build  the release binary, target/release/ubcache'
	@echo 'make deps   the packages that these targets need'

build:
	$(CARGO) build --release --bin ubcache

demo: build
	@scripts/deps demo
	@"$${CARGO_TARGET_DIR:-target}/release/ubcache" demo

test:
	@scripts/deps test
	@scripts/test

fuzz:
	@scripts/deps fuzz
	@scripts/fuzz

vm-test:
	@scripts/deps vm
	@scripts/vm-test

dashboard-test:
	@scripts/deps dashboard
	@scripts/dashboard-test

lint:
	@scripts/deps lint
	shellcheck $(SCRIPTS)
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --quiet -- -D warnings
	$(CARGO) clippy -p ubcache-vm --features vm --all-targets --quiet -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps --quiet
	$(CARGO) run --quiet -p ubcache-tidy
	scripts/deny

deny:
	@scripts/deny

soak:
	@scripts/deps fuzz
	@scripts/soak $(SOAK)

mutants:
	@scripts/mutants $(MUTANTS)

bench:
	@scripts/deps all
	@scripts/bench $(JOBS)

book:
	@scripts/book

deb:
	@scripts/deb

deps:
	@scripts/deps all
