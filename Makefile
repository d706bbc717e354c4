# Every target runs its command through `exec`, so that a signal sent to make reaches launch.py and not a shell.
#
# ARGS is read by the shell, so its quotes work: make train ARGS='--run="two words" --steps=50'.
# Write $$ for a dollar sign, since make reads ARGS first.
# make itself ends with 2 whenever a command fails; its last line names the command's own exit code
# ("Error 75": stopped on request after a checkpoint, run again to continue).

VENV ?= .venv
SIZE ?= debug
PY = $(VENV)/bin/python
STAMP = $(VENV)/.installed

.PHONY: help venv extras train test check smoke check-nodes lr-find study soak bench plan plan-ladder eval sample export report gpu-check clean

help:
	@echo 'make train    [SIZE=debug] [NODES=n] [RANKS=per node] [ARGS="--steps=50 ..."]  train on this machine'
	@echo 'make train    NODES=n [SITE=jupiter] [TIME=1:00:00] [ACCOUNT=a] [PARTITION=p] [SPARES=k] [CHAIN=m] [DRY=1] [LAUNCH="..."]'
	@echo '                                        on a login node of a cluster: prints a job script and submits it; in a job: starts there'
	@echo 'make check-nodes                        in a job: names nodes that compute or talk badly'
	@echo 'make plan     NODES=n [SIZE=1t] [ARGS="--offload_state=True ..."]  dry run: does it fit, how fast, what limits it'
	@echo 'make plan-ladder                        dry run beside published figures'
	@echo 'make eval     [ARGS="--run=name ..."]   loss of the newest checkpoint'
	@echo 'make sample   [ARGS="--run=name ..."]   text from the newest checkpoint'
	@echo 'make export   [ARGS="--run=name ..."]   the newest checkpoint as a Hugging Face directory'
	@echo 'make report   [ARGS="--run a --run b"]  a page of a run, or of several: out/a/report.html'
	@echo 'make extras                             install optional packages: lm-eval, transformers, pyarrow, ... (requirements-extra.txt)'
	@echo 'make test     [ARGS="-k name ..."]      run the tests'
	@echo 'make check    [ARGS="--size=1t ..."]    what must hold in every layout, before a run (a minute)'
	@echo 'make smoke    [ARGS=--record]           50 steps, bit for bit as recorded in tests/smoke.json'
	@echo 'make lr-find  [ARGS="--optimizer=..."]  a learning rate to start from: table, plot, suggestion'
	@echo 'make study                              optimizers and routing compared, with error bars (20 minutes)'
	@echo 'make soak     [ARGS="--kinds failures"]   a tiny run through 100 faults: killed ranks, full disk, damaged checkpoints;'
	@echo '                                        or kinds of failure that the launcher must tell apart, or hangs (--kinds hangs)'
	@echo 'make bench    [ARGS="--layout 2x2 ..."]  speed, memory and bytes beside FSDP2 and a plain loop (20 minutes)'
	@echo 'make gpu-check [RANKS=n] [ARGS=...]      is every path right on the GPUs here, and how fast; out/gpu-check.json for make plan'
	@echo 'make venv                               install the requirements into $(VENV) (the others do it when needed)'
	@echo 'make clean                              remove $(VENV) and caches; runs (out/) and data (data/) stay'

venv: $(STAMP)

$(STAMP): requirements.txt
	@for python in python3 python3.13 python3.12 python3.11 python3.10; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	    echo "installing requirements.txt into $(VENV) with $$($$python --version); torch is large, this takes minutes"; \
	    $$python -m venv "$(VENV)" && "$(PY)" -m pip install --quiet --disable-pip-version-check -r requirements.txt \
	      && touch "$(STAMP)"; \
	    exit $$?; \
	  fi; \
	done; \
	echo "error: no Python 3.10 or newer as python3 or python3.10 to python3.13 on the PATH; install one" >&2; exit 1

# What is given of these becomes an option of launch.py; LAUNCH is passed on as it is.
LAUNCHER = $(strip $(if $(NODES),--nodes $(NODES)) $(if $(RANKS),--ranks-per-node $(RANKS)) $(if $(SITE),--site $(SITE)) \
  $(if $(TIME),--time $(TIME)) $(if $(ACCOUNT),--account $(ACCOUNT)) $(if $(PARTITION),--partition $(PARTITION)) \
  $(if $(SPARES),--spares $(SPARES)) $(if $(CHAIN),--chain $(CHAIN)) $(if $(filter-out 0,$(DRY)),--dry))

train: $(STAMP)
	exec $(PY) launch.py $(LAUNCHER) $(LAUNCH) -- train.py --size=$(SIZE) $(ARGS)

check-nodes: $(STAMP)
	exec $(PY) cluster.py check-nodes

test: $(STAMP)
	exec $(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

soak: $(STAMP)
	exec $(PY) tests/soak.py $(ARGS)

check: $(STAMP)
	exec $(PY) check.py $(ARGS)

smoke: $(STAMP)
	exec $(PY) tests/smoke.py $(ARGS)

lr-find: $(STAMP)
	exec $(PY) lr_find.py $(if $(NODES),--nodes=$(NODES)) $(if $(RANKS),--ranks-per-node=$(RANKS)) --size=$(SIZE) $(ARGS)

study: $(STAMP)
	exec $(PY) tests/study.py $(ARGS)

bench: $(STAMP)
	exec $(PY) bench.py $(ARGS)

plan: SIZE = 1t
plan: $(STAMP)
	exec $(PY) plan.py --nodes $(or $(NODES),96) --size $(SIZE) $(ARGS)

plan-ladder: $(STAMP)
	exec $(PY) plan.py --ladder $(ARGS)

eval: $(STAMP)
	exec $(PY) eval.py loss $(ARGS)

sample: $(STAMP)
	exec $(PY) eval.py sample $(ARGS)

export: $(STAMP)
	exec $(PY) export.py export $(ARGS)

report: $(STAMP)
	exec $(PY) report.py $(ARGS)

gpu-check: $(STAMP)
	exec $(PY) launch.py --scheduler=none $(if $(RANKS),--ranks-per-node $(RANKS)) -- gpu_check.py $(ARGS)

extras: $(STAMP)
	exec $(PY) -m pip install --quiet --disable-pip-version-check -r requirements-extra.txt

clean:
	rm -rf "$(VENV)" .pytest_cache __pycache__ tests/__pycache__
