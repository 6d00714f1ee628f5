# kvpack: one Makefile, not recursive.
#
# make [all]        daemon, library, kvpackctl       make tests       all test programs too
# make check        installs missing packages, builds, runs every test (T=test_inbox: that one)
# make demo         the same for the demo: two daemons, eight ranks, every byte checked
# make asan         check under ASan and UBSan       make tsan        threads under TSan: stress programs, daemons
# make valgrind     Criterion tests under valgrind   make bench       all benchmarks (T=bench_x: one)
# make torture      every allocation and foreign call fails in turn (PART=start|run|restart|stop|gpu|ctl|verbs STRIDE=8)
# make load         256 clients, 50,000 rooms, 256 peers: latencies, memory, limits
# make check-rdma   RDMA verbs for real: soft RoCE in a QEMU guest, which it builds from Debian packages
# make matrix            every state of a room x every victim x every fault (T=sample, T='x20 want/')
# make fuzz T=msg SECS=60    one libFuzzer target    make deps        only the Debian packages
# make soak SECS=60 [SEED=n] looks for wrong bytes under aborts, restarts, and reuse of everything
# make lint         clang-tidy and cppcheck          make format      (format-check only looks)
# make analyze      gcc -fanalyzer over daemon, library and protocol
# make parity       a model says the same when its cache was moved      make python      the wheel, into build/
# make top          ten longest functions            make install     (uninstall) PREFIX, DESTDIR
#
# Knobs, given as make KNOB=value:
#   CC=clang               compiler (gcc); gcc and clang are kept free of warnings
#   SAN=address,undefined  sanitizers (none); thread is not for Criterion programs
#   KVP_TEST=1             compiles named test points into the daemon; `make check` sets it
#   WERROR=                warnings stay warnings (-Werror)
#   CUDA=0                 does not look for a CUDA toolkit (auto)
#   V=1                    prints whole commands
#   CFLAGS, LDFLAGS        added at the end (-O2 -g, none)
#   PREFIX, DESTDIR, SYSCONFDIR, UNITDIR   where install puts things (/usr/local, none, /etc,
#                          PREFIX/lib/systemd/system)
# Each combination of CC, SAN and KVP_TEST builds in its own folder below build/.

ifeq ($(origin CC),default)
CC := gcc
endif
CFLAGS ?= -O2 -g
WERROR ?= -Werror
PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
UNITDIR ?= $(PREFIX)/lib/systemd/system
SECS ?= 60
VERSION := 0.1.0

comma := ,
BUILD := build/$(if $(FUZZ),fuzz,$(or $(subst $(comma),+,$(SAN)),plain))-$(notdir $(firstword $(CC)))$(if $(KVP_TEST),-test)$(if $(filter 0,$(CUDA)),-nocuda)
Q := $(if $(V),,@)
say = $(if $(V)$(findstring s,$(firstword -$(MAKEFLAGS))),,@printf '  %-5s %s\n' '$(1)' '$(@:$(BUILD)/%=%)')

WARN := -Wall -Wextra -Wshadow -Wformat=2 -Wvla -Wundef -Wpointer-arith -Wwrite-strings \
	-Wstrict-prototypes -Wmissing-prototypes -Wconversion -Wno-sign-conversion $(WERROR)
SANFLAGS := $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all -fno-omit-frame-pointer) \
	$(if $(FUZZ),-fsanitize=fuzzer-no-link)
# UCX last: its libraries export the symbols of a copy of inih.
PKGS := libuv libprotobuf-c libcjson inih libxxhash ucx libibverbs librdmacm
# The kernels need a toolkit; the driver is looked for when the daemon runs.
NVCC := $(if $(filter 0,$(CUDA)),,$(shell command -v nvcc 2>/dev/null))
CUDA_INC := $(if $(NVCC),$(patsubst %/cuda.h,%,$(firstword $(wildcard $(dir $(shell readlink -f $(NVCC)))../include/cuda.h))))
CUDA_ARCHS := 80 90 100
CPPFLAGS_ALL := -D_GNU_SOURCE $(if $(CUDA_INC),-DKVP_CUDA=1 -isystem $(CUDA_INC)) -DKVP_VERSION='"$(VERSION)"' $(if $(KVP_TEST),-DKVP_TEST=1) -I. -I$(BUILD) \
	$(shell pkg-config --cflags $(PKGS) 2>/dev/null)
CFLAGS_ALL = -std=gnu17 -fPIC -pthread -fstack-protector-strong $(if $(SAN)$(FUZZ),,-D_FORTIFY_SOURCE=2) $(SANFLAGS) $(CFLAGS)
LDFLAGS_ALL = -pthread -Wl,--as-needed -Wl,-z,relro,-z,now $(SANFLAGS) $(LDFLAGS)
LIBS := $(shell pkg-config --libs $(PKGS) 2>/dev/null) -ldl # --as-needed: each program gets what it uses

# What there is. A part without sources is left out.
PBC := $(patsubst %.proto,$(BUILD)/%.pb-c.c,$(wildcard proto/*.proto))
PBH := $(PBC:.c=.h)
obj = $(patsubst %.c,$(BUILD)/%.o,$(1))
PROTO_OBJ := $(call obj,$(wildcard proto/*.c)) $(PBC:.c=.o)
DAEMON_OBJ := $(call obj,$(filter-out daemon/main.c,$(wildcard daemon/*.c))) $(if $(CUDA_INC),$(BUILD)/kernels/image.o)
CTL_OBJ := $(call obj,$(wildcard client/ctl*.c))
CLIENT_OBJ := $(call obj,$(filter-out client/ctl%.c,$(wildcard client/*.c)))
bin = $(patsubst %.c,$(BUILD)/%,$(wildcard $(1)))
CRITERION_BIN := $(call bin,tests/test_*.c)
FUZZ_BIN := $(call bin,tests/fuzz_*.c)
PLAIN_BIN := $(call bin,tests/stress_*.c tests/bench_*.c tests/replay_*.c tests/demo*.c tests/matrix.c tests/load.c)
# The same tests of lanes with a GPU that is none.
FAKE_GPU_BIN := $(patsubst %,$(BUILD)/tests/%_gpu,test_lane test_lane_rooms test_lane_fair test_lane_hostile)
# And over RDMA, straight into the pools, with a device that is none.
FAKE_DIRECT_BIN := $(patsubst %,$(BUILD)/tests/%_direct,test_lane test_lane_rooms test_lane_fair)
TEST_BIN := $(CRITERION_BIN) $(FAKE_GPU_BIN) $(FAKE_DIRECT_BIN) $(FUZZ_BIN) $(PLAIN_BIN)
RXE_BIN := $(BUILD)/tests/rxe_checks
# Daemon and library with a shim in front of each foreign call that can fail.
TORTURE := $(BUILD)/torture
TORTURE_BIN := $(addprefix $(TORTURE)/,kvpackd kvpackctl libkvpack.so.1 torture ctl verbs)
TORTURE_WRAP := $(shell sed -n 's/^\tCALL.\([a-z0-9_]*\),.*/-Wl,--wrap=\1/p' tests/torture_calls.h)
# Programs for a machine with a GPU; made wherever there is a toolkit.
GPU_LANE_BIN := $(if $(CUDA_INC),$(patsubst %,$(BUILD)/tests/gpu/%,test_lane test_lane_rooms test_lane_fair test_lane_hostile))
GPU_BIN := $(if $(CUDA_INC),$(call bin,tests/gpu/gpu_*.c)) $(GPU_LANE_BIN)
# A driver that is none, for replay_gpu where there is no GPU.
FAKE_CUDA := $(if $(CUDA_INC),$(BUILD)/tests/fake/libcuda.so.1)
# A whole daemon on the RDMA device that is none, for replay_gpu_direct.
FAKE_DAEMON := $(BUILD)/tests/fake/kvpackd

PROTO_A := $(BUILD)/libkvp-proto.a
DAEMON_A := $(BUILD)/libkvpackd.a
CLIENT_A := $(BUILD)/libkvpack.a
CLIENT_SO := $(BUILD)/libkvpack.so.1
SUPPORT_A := $(BUILD)/libsupport.a
TEST_LIBS := $(SUPPORT_A) $(DAEMON_A) $(CLIENT_A) $(PROTO_A)
MAINS := $(if $(wildcard daemon/main.c),$(BUILD)/kvpackd) $(if $(shell grep -s '^int main' client/ctl*.c),$(BUILD)/kvpackctl)
SYMFILE := $(wildcard client/libkvpack.sym)
RUN_ENV := KVP_TOP=$(CURDIR) KVP_BIN=$(CURDIR)/$(BUILD)
CH_FILES = $(wildcard $(shell git ls-files -co --exclude-standard '*.[ch]'))
C_FILES = $(filter %.c,$(CH_FILES))

.PHONY: all tests help deps check check-rdma asan tsan soak valgrind matrix bench demo parity python torture load run-check run-rdma \
	run-stress run-soak run-valgrind run-matrix run-bench run-demo run-parity run-torture run-load fuzz lint analyze format format-check top gpu-bundle clean install uninstall
.DELETE_ON_ERROR:
.SECONDARY:

all: $(PROTO_A) $(DAEMON_A) $(CLIENT_A) $(if $(CLIENT_OBJ),$(CLIENT_SO)) $(MAINS)
	$(if $(CUDA_INC),,$(if $(filter 0,$(MAKELEVEL)),@echo "CUDA: left out ($(if $(filter 0,$(CUDA)),CUDA=0,no toolkit)); pools in host memory only"))

tests: all $(TEST_BIN) $(RXE_BIN) $(GPU_BIN) $(FAKE_CUDA) $(FAKE_DAEMON)

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile
# ---- compile

$(BUILD)/proto/%.pb-c.c $(BUILD)/proto/%.pb-c.h &: proto/%.proto
	$(call say,PROTO)
	@mkdir -p $(@D)
	$(Q)protoc-c --c_out=$(BUILD)/proto --proto_path=proto $<

compile = $(Q)$(CC) $(CPPFLAGS_ALL) $(CFLAGS_ALL) -MMD -MP -c -o $@ $<
$(CLIENT_OBJ): CFLAGS_ALL += -fvisibility=hidden
$(BUILD)/%.o: %.c Makefile | $(PBH)
	$(call say,CC)
	@mkdir -p $(@D)
	$(compile) $(WARN)
$(BUILD)/proto/%.pb-c.o: $(BUILD)/proto/%.pb-c.c | $(PBH)
	$(call say,CC)
	$(compile) -w

$(BUILD)/kernels/move.fatbin: kernels/move.cu kernels/move.h Makefile
	$(call say,NVCC)
	@mkdir -p $(@D)
	$(Q)$(NVCC) -std=c++17 -O3 -I. -ccbin gcc -fatbin $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$a$(comma)code=sm_$a) \
		-gencode arch=compute_$(lastword $(CUDA_ARCHS))$(comma)code=compute_$(lastword $(CUDA_ARCHS)) -o $@ $<
$(BUILD)/kernels/image.o: kernels/image.S $(BUILD)/kernels/move.fatbin
	$(call say,AS)
	$(Q)$(CC) -c -DKVP_MOVE_IMAGE='"$(BUILD)/kernels/move.fatbin"' -o $@ $<

$(PROTO_A): $(PROTO_OBJ)
$(DAEMON_A): $(DAEMON_OBJ)
$(CLIENT_A): $(CLIENT_OBJ)
$(SUPPORT_A): $(call obj,$(wildcard tests/support*.c))
$(BUILD)/%.a: Makefile
	$(call say,AR)
	@mkdir -p $(@D)
	$(Q)rm -f $@ && $(AR) rcs $@ $(filter %.o,$^)
# ---- link

$(CLIENT_SO): $(CLIENT_OBJ) $(PROTO_OBJ) $(SYMFILE)
	$(call say,LD)
	$(Q)$(CC) $(LDFLAGS_ALL) -shared -Wl,-soname,libkvpack.so.1 \
		$(if $(SYMFILE),-Wl$(comma)--version-script=$(SYMFILE)) -o $@ $(filter %.o,$^) $(LIBS)
	$(Q)ln -sf libkvpack.so.1 $(BUILD)/libkvpack.so

$(BUILD)/kvpackd: $(BUILD)/daemon/main.o $(DAEMON_A) $(PROTO_A)
$(FAKE_DAEMON): $(BUILD)/daemon/main.o $(BUILD)/tests/fake_daemon.o $(BUILD)/tests/fake_verbs.o $(DAEMON_A) $(PROTO_A)
$(BUILD)/kvpackctl: $(CTL_OBJ) $(CLIENT_A) $(PROTO_A)
$(filter-out $(FAKE_GPU_BIN) $(FAKE_DIRECT_BIN),$(TEST_BIN)): $(BUILD)/%: $(BUILD)/%.o $(TEST_LIBS)
$(FAKE_GPU_BIN): %_gpu: %.o $(BUILD)/tests/fake_gpu.o $(TEST_LIBS)
$(FAKE_DIRECT_BIN): %_direct: %.o $(BUILD)/tests/fake_direct.o $(BUILD)/tests/fake_verbs.o $(TEST_LIBS)
$(filter-out $(GPU_LANE_BIN),$(GPU_BIN)): $(BUILD)/%: $(BUILD)/%.o $(TEST_LIBS)
$(GPU_LANE_BIN): $(BUILD)/tests/gpu/%: $(BUILD)/tests/%.o $(BUILD)/tests/gpu/real.o $(TEST_LIBS)
$(GPU_LANE_BIN): EXTRA := -lcriterion $(CUDA_INC)/../lib64/stubs/libcuda.so
$(filter-out $(GPU_LANE_BIN),$(GPU_BIN)): EXTRA := $(CUDA_INC)/../lib64/stubs/libcuda.so
$(RXE_BIN): $(call obj,$(wildcard tests/rxe/*.c)) $(TEST_LIBS)
# With FUZZ=1 libFuzzer brings main(); otherwise a small main replays the corpus.
$(BUILD)/tests/test_ctl_plan $(BUILD)/tests/fuzz_vectors: $(BUILD)/client/ctl_plan.o
$(BUILD)/tests/test_qp $(BUILD)/tests/test_net_verbs $(BUILD)/tests/test_net_rails $(BUILD)/tests/test_net_direct: $(BUILD)/tests/fake_verbs.o
$(BUILD)/tests/test_net_cm: $(BUILD)/tests/fake_verbs.o $(BUILD)/tests/fake_rdmacm.o
$(BUILD)/tests/test_direct $(BUILD)/tests/test_direct_hostile: $(BUILD)/tests/fake_direct.o $(BUILD)/tests/fake_verbs.o
$(BUILD)/tests/test_gpu: $(BUILD)/tests/fake_gpu.o
$(BUILD)/tests/test_direct_gpu: $(BUILD)/tests/fake_gpu.o $(BUILD)/tests/fake_direct.o $(BUILD)/tests/fake_verbs.o
$(FUZZ_BIN): $(if $(FUZZ),,$(BUILD)/tests/corpus_main.o)
$(FUZZ_BIN): EXTRA := $(if $(FUZZ),-fsanitize=fuzzer)
$(CRITERION_BIN) $(FAKE_GPU_BIN) $(FAKE_DIRECT_BIN): EXTRA := -lcriterion
$(CRITERION_BIN) $(FAKE_GPU_BIN) $(FAKE_DIRECT_BIN): $(BUILD)/tests/slow_limits.o
$(BUILD)/tests/test_peer: EXTRA += -Wl,--wrap=calloc
# Its driver is its own.
$(BUILD)/tests/test_device: EXTRA += -Wl,--wrap=dlopen -Wl,--wrap=dlsym
$(MAINS) $(TEST_BIN) $(RXE_BIN) $(GPU_BIN) $(FAKE_DAEMON):
	$(call say,LD)
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $(filter %.o,$^) -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(EXTRA) $(LIBS)
$(FAKE_CUDA): $(BUILD)/tests/fake_cuda.o
	$(call say,LD)
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -shared -Wl,-soname,libcuda.so.1 -o $@ $<

$(TORTURE)/shim.o: tests/torture_shim.c tests/torture_calls.h Makefile
	$(call say,CC)
	@mkdir -p $(@D)
	$(compile) -DTORTURE_LIBRARY $(WARN)
$(TORTURE)/kvpackd: $(BUILD)/daemon/main.o $(BUILD)/tests/torture_shim.o $(DAEMON_A) $(PROTO_A)
$(TORTURE)/libkvpack.so.1: $(CLIENT_OBJ) $(PROTO_OBJ) $(TORTURE)/shim.o
$(TORTURE)/kvpackctl: $(CTL_OBJ) $(BUILD)/tests/torture_shim.o $(CLIENT_A) $(PROTO_A)
$(TORTURE)/ctl: $(BUILD)/tests/torture_ctl.o $(SUPPORT_A) $(CLIENT_A) $(PROTO_A)
$(TORTURE)/torture: $(BUILD)/tests/torture.o $(BUILD)/tests/torture_pass.o $(SUPPORT_A) $(TORTURE)/libkvpack.so.1
$(TORTURE)/kvpackd $(TORTURE)/kvpackctl: EXTRA := $(TORTURE_WRAP) -Wl,--wrap=dlsym
$(TORTURE)/libkvpack.so.1: EXTRA := $(TORTURE_WRAP) -shared -Wl,-soname,libkvpack.so.1 -Wl,--version-script=$(SYMFILE)
$(TORTURE)/verbs: $(BUILD)/tests/torture_verbs.o $(BUILD)/tests/fake_verbs.o $(BUILD)/tests/fake_rdmacm.o $(TEST_LIBS)
$(TORTURE)/verbs: EXTRA := $(filter $(addprefix -Wl$(comma)--wrap=,ibv_% _ibv_% rdma_%),$(TORTURE_WRAP))
$(TORTURE)/torture: EXTRA := $(TORTURE)/libkvpack.so.1 -Wl,-rpath,'$$ORIGIN'
$(TORTURE_BIN):
	$(call say,LD)
	@mkdir -p $(@D)
	$(Q)$(CC) $(LDFLAGS_ALL) -o $@ $(filter %.o,$^) -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(EXTRA) $(LIBS)
# ---- run

sub = +@$(MAKE) --no-print-directory
pick = $(if $(T),$(addprefix $(BUILD)/tests/,$(T)),$(filter $(1:%=$(BUILD)/tests/%_%),$(TEST_BIN)))

deps:
	@tests/deps.sh
check: deps
	$(sub) KVP_TEST=1 run-check
check-rdma:
	@tests/deps.sh rdma || echo 'check-rdma: going on with what there is'
	$(sub) KVP_TEST=1 run-rdma
asan: deps
	$(sub) KVP_TEST=1 SAN=address,undefined run-check
tsan: deps
	$(sub) KVP_TEST=1 SAN=thread run-stress
soak: deps
	$(sub) KVP_TEST=1 run-soak
valgrind: deps
	$(sub) KVP_TEST=1 run-valgrind
matrix: deps
	$(sub) KVP_TEST=1 run-matrix
torture: deps
	$(sub) KVP_TEST=1 SAN=address,undefined run-torture
load: deps
	$(sub) run-load
bench demo parity: deps
	$(sub) run-$@
run-check: tests
	@$(RUN_ENV) tests/run.sh $(call pick,test) $(if $(T),,$(call pick,fuzz stress replay) tests/layers.sh tests/symbols.sh $(wildcard tests/check_*.sh))
run-rdma: tests
	@$(RUN_ENV) tests/rxe/run.sh $(if $(T),'$(T)')
# Criterion's runner does not live under TSan; daemons with their real threads do.
TSAN_REPLAY = $(addprefix $(BUILD)/tests/replay_,sglang vllm hot faults_drain $(if $(FAKE_CUDA),gpu))
run-stress: all $(call pick,stress) $(if $(T),,$(TSAN_REPLAY) $(FAKE_CUDA))
	@$(RUN_ENV) tests/run.sh $(filter-out all $(FAKE_CUDA),$^)
# Criterion does not look at how a test's process ended, so what valgrind has said is looked for; but not
# that mount(2) may have no type, which is fine with some flags.
VALGRIND_LOGS := $(CURDIR)/$(BUILD)/valgrind
run-valgrind: all $(call pick,test)
	@rm -rf $(VALGRIND_LOGS) && mkdir -p $(VALGRIND_LOGS)
	@KVP_WRAP='valgrind -q --log-file=$(VALGRIND_LOGS)/%p --error-exitcode=9 --trace-children=yes --trace-children-skip=*/mount,*/umount' \
		KVP_SLOW=10 KVP_TIMEOUT=600 $(RUN_ENV) tests/run.sh $(call pick,test)
	@! grep -rhE -A12 '^==[0-9]+== (Invalid|Conditional|Use of|Syscall param ([^m]|m[^o])|Source and|Mismatched|Jump to|Argument)' $(VALGRIND_LOGS)
run-matrix: all $(BUILD)/tests/matrix
	@$(RUN_ENV) UCX_LOG_LEVEL=error $(BUILD)/tests/matrix $(or $(T),all)
run-torture: $(TORTURE_BIN) $(FAKE_CUDA)
	@$(foreach p,$(filter-out ctl verbs,$(or $(PART),all $(if $(FAKE_CUDA),gpu))),KVP_BIN=$(CURDIR)/$(TORTURE) UCX_LOG_LEVEL=error \
		$(TORTURE)/torture $p $(or $(STRIDE),1) $(FIRST) &&) true
	@$(if $(filter-out ctl,$(PART)),,KVP_BIN=$(CURDIR)/$(TORTURE) UCX_LOG_LEVEL=error $(TORTURE)/ctl $(or $(STRIDE),1) $(FIRST))
	@$(if $(filter-out verbs,$(PART)),,$(TORTURE)/verbs $(or $(STRIDE),1) $(FIRST))
run-load: all $(BUILD)/tests/load
	@$(RUN_ENV) UCX_LOG_LEVEL=error $(BUILD)/tests/load
run-bench: all $(call pick,bench)
	@KVP_SHOW=1 KVP_JOBS=1 $(RUN_ENV) tests/run.sh $(call pick,bench)
run-demo: all $(call bin,tests/demo*.c)
	@$(if $(wildcard tests/demo.c),$(RUN_ENV) UCX_LOG_LEVEL=error $(BUILD)/tests/demo)
run-soak: all $(BUILD)/tests/replay_soak
	@KVP_SOAK_SECS=$(SECS) KVP_SOAK_SEED=$(SEED) UCX_LOG_LEVEL=error $(RUN_ENV) $(BUILD)/tests/replay_soak
run-parity: all
	@$(RUN_ENV) tests/parity/run.sh
python: deps
	@rm -rf build/python && mkdir -p build && cp -r client/python build/python
	@cd build/python && /usr/bin/python3 -m pip wheel -q --no-build-isolation --no-deps --no-index -w .. . && ls -1 $(CURDIR)/build/*.whl
fuzz: deps
	$(sub) CC=clang SAN=address,undefined FUZZ=1 build/fuzz-clang/tests/fuzz_$(T)
	@mkdir -p build/fuzz-clang/$(T) tests/corpus/$(T)
	cd tests/corpus && ../../build/fuzz-clang/tests/fuzz_$(T) -max_total_time=$(SECS) -timeout=60 $(if $(filter session rooms,$(T)),-detect_leaks=0) -artifact_prefix=$(T)/ ../../build/fuzz-clang/$(T) $(T)

# With the test points; what is there instead of CUDA, too.
lint: deps $(PBH)
	@echo $(C_FILES) | tr ' ' '\n' | xargs -P2 -n1 tests/tidy.sh $(CPPFLAGS_ALL) -DKVP_TEST=1 -std=gnu17 --
	@tests/tidy.sh $(filter-out -DKVP_CUDA=1,$(CPPFLAGS_ALL)) -DKVP_TEST=1 -std=gnu17 -- daemon/gpu_none.c
	@cppcheck -q -j2 --std=c11 --enable=warning,performance,portability --inline-suppr --error-exitcode=1 \
		$$(printf '#include <sys/queue.h>\n#include <utlist.h>\n' | $(CC) -xc -M - | tr ' ' '\n' | \
			sed -n '/queue.h\|utlist.h/s/^/--include=/p') \
		--suppress=missingIncludeSystem --suppress=memleak --suppress=resourceLeak -I. -DKVP_TEST=1 -D__cppcheck__ $(filter-out tests/test_%,$(C_FILES))

# What it finds is an error. Not looked for: leaks, since gcc 12 loses what goes into an intrusive list,
# to another thread, or out by a cleanup attribute (all 18 that it names); LeakSanitizer sees real ones.
ANALYZE_FILES = $(wildcard proto/*.c client/*.c daemon/*.c)
analyze: deps $(PBH)
	@echo $(ANALYZE_FILES) | tr ' ' '\n' | xargs -P2 -n1 gcc -fanalyzer -Werror -Wno-analyzer-malloc-leak \
		-O1 -S -o /dev/null $(CPPFLAGS_ALL) -DKVP_TEST=1 -std=gnu17

format: deps
	@clang-format -i $(CH_FILES)
format-check: deps
	@! clang-format --dry-run --Werror $(CH_FILES) 2>&1 | grep -oE '^[^: ]+:[0-9]+' | sort -ut: -k1,1 | grep .
# Runs on a bare machine with a GPU; see docs/benchmarks.md.
gpu-bundle: tests
	@tests/gpu/variants.sh $(BUILD)/tests/gpu/variants
	@tests/gpu/bundle.sh $(BUILD) build/gpu-bundle

top:
	@awk '/^[a-z].*\(/ { name = $$0 } /^{/ { from = FNR } /^}/ && name { print FNR - from - 1, FILENAME ": " name; name = "" }' \
		$(C_FILES) | sort -rn | head -10
clean:
	rm -rf build
# ---- install

P := $(DESTDIR)$(PREFIX)
UNITS := $(notdir $(wildcard systemd/*.service systemd/*.socket))
fill = sed 's|/usr/local|$(PREFIX)|; s|/etc/kvpack|$(SYSCONFDIR)/kvpack|; s|@VERSION@|$(VERSION)|' $(1) >$(2)
install: all
	install -d $(P)/bin $(P)/include $(P)/lib/pkgconfig $(P)/lib/sysusers.d $(P)/lib/tmpfiles.d
	install -d $(DESTDIR)$(SYSCONFDIR)/kvpack $(DESTDIR)$(UNITDIR)
	install -m 755 $(MAINS) $(P)/bin/
	install -m 755 $(CLIENT_SO) $(P)/lib/ && ln -sf libkvpack.so.1 $(P)/lib/libkvpack.so
	install -m 644 client/kvpack.h $(P)/include/
	$(call fill,client/kvpack.pc.in,$(P)/lib/pkgconfig/kvpack.pc)
	$(foreach u,$(UNITS),$(call fill,systemd/$u,$(DESTDIR)$(UNITDIR)/$u) &&) true
	install -m 644 systemd/kvpack.sysusers $(P)/lib/sysusers.d/kvpack.conf
	install -m 644 systemd/kvpack.tmpfiles $(P)/lib/tmpfiles.d/kvpack.conf
	cd $(DESTDIR)$(SYSCONFDIR)/kvpack && { test -e kvpackd.conf || install -m 644 $(CURDIR)/conf/kvpackd.conf .; }
uninstall: # the configuration stays
	cd $(P) && rm -f bin/kvpackd bin/kvpackctl lib/libkvpack.so* include/kvpack.h lib/pkgconfig/kvpack.pc lib/*.d/kvpack.conf
	rm -f $(addprefix $(DESTDIR)$(UNITDIR)/,$(UNITS))

-include $(shell test -d $(BUILD) && find $(BUILD) -name '*.d')
