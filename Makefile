# SPDX-License-Identifier: Apache-2.0
# larder: one Makefile. `make help` lists what can be asked.
#   V=1                      shows the commands
#   SAN=address,undefined    builds and checks under sanitizers, in a folder of its own; SAN=thread likewise
#   CC=clang                 the other compiler
#   PREFIX, DESTDIR          where `make install` puts things
#   NVCC=                    builds without what runs on a GPU; NVCC=path another nvcc than that of PATH

PREFIX ?= /usr/local
MULTIARCH := lib
BUILD ?= build$(if $(SAN),/san-$(subst $(comma),-,$(SAN)))
comma := ,
ifeq ($(origin CC),default)
CC := gcc
endif
Q := $(if $(V),,@)
say = $(if $(V)$(findstring s,$(firstword -$(MAKEFLAGS))),,@printf '  %-5s %s\n' $(1) $(2))

# The kernels for GPUs: code for the generations that this nvcc knows, PTX of its oldest for all others.
NVCC ?= $(shell command -v nvcc)
KERNELS ?= $(if $(NVCC),$(BUILD)/kernels.fatbin)
NVCC_CODES := $(if $(NVCC),$(shell $(NVCC) --list-gpu-code))
KERNELS_SM := $(filter sm_80 sm_90 sm_100 sm_120,$(NVCC_CODES))
KERNELS_PTX := $(patsubst sm_%,compute_%,$(firstword $(filter-out sm_3% sm_5% sm_6%,$(NVCC_CODES))))

PACKAGES := liburing-dev libzstd-dev libssl-dev libxxhash-dev libjansson-dev libinih-dev libcmocka-dev \
            gcc make pkg-config python3 python3-pytest mandoc openssl iproute2 \
            $(if $(filter x86_64,$(shell uname -m)),libipsec-mb-dev)
TIDY_PACKAGES := clang clang-format cppcheck libclang-rt-dev gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user \
                 e2fsprogs xfsprogs btrfs-progs
MEMORY_PACKAGES := valgrind libc6-dbg

WARNINGS := -Wall -Wextra -Werror -Wshadow -Wvla -Wstrict-prototypes -Wmissing-prototypes $(if $(findstring clang,$(CC)),,-Wno-format-truncation)
HARDEN := $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all,-D_FORTIFY_SOURCE=2 -fstack-protector-strong)
CFLAGS ?= -O2 -g
CPPFLAGS += -I. -D_GNU_SOURCE
COMPILE = $(CC) -std=gnu17 $(CPPFLAGS) $(CFLAGS) $(WARNINGS) $(HARDEN) -fPIC -fvisibility=hidden -pthread -MMD -MP
LINK = $(CC) $(CFLAGS) $(HARDEN) -pthread $(LDFLAGS)

FORMAT_LIBS := -lzstd -lssl -lcrypto -lxxhash -ljansson -lm
SERVER_LIBS := -luring -linih
CLIENT_LIBS := -ldl -lm

sources = $(sort $(foreach d,$(1),$(wildcard $(d)/*.c $(d)/*/*.c $(d)/*/*/*.c)))
objects = $(patsubst %.c,$(BUILD)/obj/%.o,$(1))

FORMAT := $(call objects,$(call sources,format))
GPUDIRECT := $(call objects,$(call sources,gpudirect))
CLIENT := $(call objects,$(call sources,client))
SERVER := $(call objects,$(filter-out server/main.c,$(call sources,server)))
TOOLS := $(call objects,$(wildcard tools/*.c))
SUPPORT := $(call objects,$(wildcard tests/support/*.c))
UNIT := $(patsubst %.c,$(BUILD)/%,$(call sources,tests/unit tests/fault))
DEMO := $(call objects,$(wildcard tools/demo/*.c))
PROGRAMS := $(if $(wildcard server/main.c),$(BUILD)/larderd) \
            $(if $(wildcard client/larder.map),$(BUILD)/liblarder.so $(BUILD)/larder $(BUILD)/larder-demo)

.PHONY: all check check-memory demo bench bench-weights bench-peers fuzz sim soak stress tidy install uninstall deps clean help tests checked
.SUFFIXES:
.SECONDARY:

all: deps-quick $(PROGRAMS)

help:
	@printf '%s\n' \
	    'make              builds larderd, larder and liblarder.so into $(BUILD)/' \
	    'make check        every test and the checks of the house rules; T=word runs those whose names have it' \
	    'make check-memory  every test under ASan and UBSan, what has threads under TSan, a part under valgrind; T=part' \
	    'make demo         trains, kills a rank in the middle of a save, resumes on more ranks' \
	    'make bench        what this machine can do, and how near larder comes; BENCH_ARGS="--bytes 2G"'\
	    'make bench-weights  the codecs on a published model and on a trained optimiser' \
	    'make bench-peers  larder beside zstd, openssl and cp, and beside PyTorch, on this disk (installs them below build/)' \
	    'make bench-feed   what the feed is meant to reach, as ratios of runs that take turns' \
	    'make bench-nginx  the same files by larderd and by nginx, in one run (installs nginx-light and curl)' \
	    'make sim          SEEDS=n (1000) histories on the simulator, from FROM=seed on' \
	    'make soak         every proof for its share of HOURS=h (1), and a table of what it reached; T=word' \
	    'make stress       10,000 saves from devices (the stand-in), each overwritten at once; SAVES=n' \
	    'make fuzz         every fuzz target; FUZZ_SECONDS=n, T=word' \
	    'make tidy         cppcheck, formatting and the checks of the house rules' \
	    'make install      below PREFIX (/usr/local), DESTDIR before it; make uninstall takes it away' \
	    'make deps         installs the Debian packages that are missing, also those of fuzz, tidy and check-memory' \
	    'make clean        removes build/' \
	    '' \
	    'V=1                      shows the commands' \
	    'SAN=address,undefined    builds and checks under sanitizers, in a folder of its own; SAN=thread likewise' \
	    'CC=clang BUILD=build/clang  the other compiler' \
	    'NVCC=                    without the kernels for GPUs, also where nvcc is there'

# Installs what is missing, saying which; as root or through sudo. DEPS=true looks for nothing.
DEPS ?= tools/deps
deps:
	$(Q)tools/deps $(PACKAGES) $(TIDY_PACKAGES) $(MEMORY_PACKAGES)
.PHONY: deps-quick
deps-quick:
	$(Q)$(DEPS) $(PACKAGES)

$(BUILD)/obj/%.o: %.c | deps-quick
	$(call say,CC,$<)
	$(Q)mkdir -p $(@D)
	$(Q)$(COMPILE) -c $< -o $@

# Made anew when another nvcc is used, or none. KERNELS=file: an image that was made elsewhere.
KERNELS_OF := $(if $(NVCC),$(NVCC) $(KERNELS_SM) $(KERNELS_PTX),$(KERNELS))
ifneq ($(shell cat $(BUILD)/nvcc 2>/dev/null),$(strip $(KERNELS_OF)))
.PHONY: $(BUILD)/nvcc
endif
$(BUILD)/nvcc:
	$(Q)mkdir -p $(@D)
	$(Q)echo '$(strip $(KERNELS_OF))' >$@

ifneq ($(NVCC),)
$(KERNELS): gpudirect/kernels.cu gpudirect/portable.h gpudirect/chunk_hash.h gpudirect/strided.h $(BUILD)/nvcc
	$(call say,NVCC,$<)
	$(Q)$(NVCC) -std=c++17 -O3 -I. -fatbin -Xfatbin=-compress-all \
	    $(foreach s,$(KERNELS_SM),-gencode arch=$(s:sm_%=compute_%),code=$(s)) -gencode arch=$(KERNELS_PTX),code=$(KERNELS_PTX) $< -o $@
endif

$(BUILD)/obj/gpudirect/kernels_image.o: $(BUILD)/nvcc $(KERNELS)
ifneq ($(KERNELS),)
$(BUILD)/obj/gpudirect/kernels_image.o: CPPFLAGS += -DKERNELS_IMAGE='"$(KERNELS)"' \
    -DKERNELS_IMAGE_FOR='"$(if $(NVCC),$(KERNELS_SM)$(comma) and $(KERNELS_PTX) for others,made elsewhere: $(KERNELS))"'
endif

$(BUILD)/larderd: $(BUILD)/obj/server/main.o $(SERVER) $(FORMAT)
	$(call say,LINK,$@)
	$(Q)$(LINK) $^ -o $@ $(FORMAT_LIBS) $(SERVER_LIBS)

$(BUILD)/liblarder.so: $(CLIENT) $(GPUDIRECT) $(FORMAT) client/larder.map
	$(call say,LINK,$@)
	$(Q)$(LINK) -shared -Wl,-soname,liblarder.so.0 -Wl,--version-script=client/larder.map -Wl,-z,defs \
	    $(filter %.o,$^) -o $@ $(FORMAT_LIBS) $(CLIENT_LIBS)
	$(Q)ln -sf liblarder.so $(@D)/liblarder.so.0

$(BUILD)/larder: $(TOOLS) $(FORMAT) $(BUILD)/liblarder.so
	$(call say,LINK,$@)
	$(Q)$(LINK) $(filter %.o,$^) -o $@ -L$(BUILD) -llarder -Wl,-rpath,'$$ORIGIN:$$ORIGIN/../$(MULTIARCH)' $(FORMAT_LIBS) -lm

# What machines without vector code of their own run: the compiler may make vectors of it.
$(BUILD)/obj/format/codec_tiers.o: CFLAGS += -O3

# The trainer's results must not depend on how the compiler contracts products and sums.
$(DEMO): CFLAGS += -O3 -ffp-contract=off
$(BUILD)/larder-demo: $(DEMO) $(FORMAT) $(BUILD)/liblarder.so
	$(call say,LINK,$@)
	$(Q)$(LINK) $(filter %.o,$^) -o $@ -L$(BUILD) -llarder -Wl,-rpath,'$$ORIGIN' $(FORMAT_LIBS) -lm

# Every file below tests/unit and tests/fault is a program of its own; it may use every layer.
$(BUILD)/tests/%: $(BUILD)/obj/tests/%.o $(SUPPORT) $(SERVER) $(CLIENT) $(GPUDIRECT) $(FORMAT)
	$(call say,LINK,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(LINK) $^ -o $@ -lcmocka $(FORMAT_LIBS) $(SERVER_LIBS) $(CLIENT_LIBS)

# An oracle stands between this one and the cipher, which is OpenSSL's there.
$(BUILD)/tests/fault/nonces: LDFLAGS += -Wl,--wrap=EVP_CipherInit_ex -Wl,--wrap=EVP_CIPHER_CTX_free \
    -Wl,--wrap=aead_mb_create

# Those of the tools get the tools' own objects too, without the two mains.
$(BUILD)/tests/unit/tools/%: $(BUILD)/obj/tests/unit/tools/%.o $(filter-out %/larder.o,$(TOOLS)) $(filter-out %/main.o,$(DEMO)) $(FORMAT) $(BUILD)/liblarder.so
	$(call say,LINK,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(LINK) $(filter %.o,$^) -o $@ -lcmocka -L$(BUILD) -llarder -Wl,-rpath,'$(abspath $(BUILD))' $(FORMAT_LIBS) -lm

# What stands in for CUDA's driver and for cuFile in tests, and a driver that lacks everything.
STANDINS := $(BUILD)/tests/standin/libcuda.so.1 $(BUILD)/tests/standin/libcufile.so.0 $(BUILD)/tests/standin-lacking/libcuda.so.1
$(BUILD)/tests/standin/libcufile.so.0: $(call objects,$(wildcard tests/support/cufile/*.c))
$(BUILD)/tests/standin/libcuda.so.1: $(call objects,$(filter-out %/lacking.c,$(wildcard tests/support/cuda/*.c))) \
    $(BUILD)/obj/gpudirect/kernels_host.o
$(BUILD)/tests/standin-lacking/libcuda.so.1: $(BUILD)/obj/tests/support/cuda/lacking.o
$(STANDINS):
	$(call say,LINK,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(LINK) -shared -Wl,-soname,$(@F) $^ -o $@

# What tests/gpu/run runs, beside larderd.
$(BUILD)/gpu-bench: $(call objects,$(wildcard tests/gpu/*.c) tools/bench_data.c tools/bench_dev.c tools/ui.c) $(CLIENT) $(GPUDIRECT) $(FORMAT)
	$(call say,LINK,$@)
	$(Q)$(LINK) $^ -o $@ $(FORMAT_LIBS) $(CLIENT_LIBS)

# Objects whose memory can be made to run out: tests/support/scarce.c stands between them and what is named here.
SCARCE := malloc calloc realloc reallocarray aligned_alloc posix_memalign strdup strndup asprintf __asprintf_chk mmap opendir free \
          pthread_create EVP_MD_CTX_new EVP_CIPHER_CTX_new SSL_new BIO_new ZSTD_createCCtx ZSTD_createDCtx
scarce = $(patsubst $(BUILD)/obj/%,$(BUILD)/scarce/%,$(1))
$(BUILD)/scarce/%.o: $(BUILD)/obj/%.o
	$(Q)mkdir -p $(@D)
	$(Q)objcopy $(foreach f,$(SCARCE),--redefine-sym $(f)=scarce_$(f)) $< $@

$(BUILD)/tests/fault/allocations: | $(BUILD)/tests/scarce-larderd
$(BUILD)/tests/scarce-larderd: $(call scarce,$(BUILD)/obj/server/main.o $(SERVER) $(FORMAT)) $(BUILD)/obj/tests/support/scarce.o
	$(call say,LINK,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(LINK) $^ -o $@ $(FORMAT_LIBS) $(SERVER_LIBS)

$(BUILD)/tests/fault/allocations: $(BUILD)/obj/tests/fault/allocations.o $(SUPPORT) $(SERVER) $(call scarce,$(CLIENT) $(GPUDIRECT) $(FORMAT))
	$(call say,LINK,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(LINK) $^ -o $@ -lcmocka $(FORMAT_LIBS) $(SERVER_LIBS) $(CLIENT_LIBS)

# The simulator's campaign: one program of all files in tests/sim. Not the simulator's memory, but the server's runs out.
# What the client calls of the system goes to tests/sim/threads.c and sockets.c.
SIMULATOR := $(filter $(BUILD)/obj/server/io/sim%,$(SERVER))
SIMULATED := pthread_create pthread_join pthread_mutex_init pthread_mutex_destroy pthread_mutex_lock pthread_mutex_trylock \
             pthread_mutex_unlock pthread_cond_init pthread_cond_destroy pthread_cond_wait pthread_cond_timedwait pthread_cond_signal \
             pthread_cond_broadcast pthread_setname_np pthread_sigmask setpriority nice clock_gettime nanosleep getrandom \
             getaddrinfo freeaddrinfo socket connect setsockopt getsockopt send recvmsg shutdown eventfd close read write poll
simulated = $(patsubst $(BUILD)/obj/%,$(BUILD)/simulated/%,$(1))
$(BUILD)/simulated/%.o: $(BUILD)/obj/%.o
	$(Q)mkdir -p $(@D)
	$(Q)objcopy $(foreach f,$(SIMULATED),--redefine-sym $(f)=simulated_$(f)) $< $@

$(BUILD)/tests/sim/campaign: LDFLAGS += -Wl,--wrap=secrets_load -Wl,--wrap=channel_config_create
$(BUILD)/tests/sim/campaign: $(call objects,$(wildcard tests/sim/*.c) tests/support/scarce.c) $(SIMULATOR) \
    $(call scarce,$(filter-out $(SIMULATOR),$(SERVER)) $(FORMAT)) $(call simulated,$(CLIENT) $(GPUDIRECT))
	$(call say,LINK,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(LINK) $^ -o $@ $(FORMAT_LIBS) $(SERVER_LIBS) $(CLIENT_LIBS)

tests: all $(UNIT) $(STANDINS) $(BUILD)/gpu-bench $(BUILD)/tests/sim/campaign

# What tests/run starts with these words of T: all of it, or only programs whose paths hold one of them.
asked = $(strip $(foreach t,$(1),$(if $(strip $(foreach w,$(T),$(findstring $(w),$(t)))),$(t))))
CAMPAIGNS := $(addprefix tests/sim/,campaign images sites allocations cuts)
ifneq ($(if $(T),$(call asked,$(wildcard tests/integration/*.py)),all),)
checked: tests
else
checked: all $(call asked,$(UNIT)) $(STANDINS) $(if $(call asked,$(CAMPAIGNS)),$(BUILD)/tests/sim/campaign)
endif

# Each program of tests/fuzz runs for FUZZ_SECONDS on its corpus; ends with a count. T=word: only those.
FUZZ_SECONDS ?= 60
FUZZ_SAN := address,undefined
FUZZERS := $(patsubst tests/fuzz/%.c,build/fuzz/%,$(wildcard tests/fuzz/*.c))
FUZZ_FORMAT := $(patsubst %.c,build/fuzz/obj/%.o,$(call sources,format))
# Fuzzers hold their own sanitizers: a build with SAN= leaves them out, and so do words that do not ask for them.
FUZZ_IN_CHECK := $(if $(SAN),,$(if $(T),$(findstring fuzz,$(T)),yes))

# Ends with "N passed, N failed, N skipped".
check: checked $(if $(FUZZ_IN_CHECK),$(if $(shell command -v clang),$(FUZZERS)))
	$(Q)BUILD=$(BUILD) FUZZ_SECONDS=$(if $(FUZZ_IN_CHECK),$(FUZZ_SECONDS),0) tests/run $(T)

# The whole suite under sanitizers, a part under valgrind. T=word: only the parts of tests/memory/run with that name.
check-memory:
	$(Q)tools/deps $(MEMORY_PACKAGES)
	$(Q)tests/memory/run $(T)

build/fuzz/obj/%.o: %.c | deps-quick
	$(call say,CC,$<)
	$(Q)mkdir -p $(@D)
	$(Q)clang -std=gnu17 $(CPPFLAGS) -O1 -g $(filter-out -Wno-%,$(WARNINGS)) -fsanitize=fuzzer-no-link,$(FUZZ_SAN) -fno-sanitize-recover=all \
	    -fno-omit-frame-pointer -pthread -MMD -MP -c $< -o $@

build/fuzz/config: build/fuzz/obj/server/config.o
build/fuzz/%: build/fuzz/obj/tests/fuzz/%.o $(FUZZ_FORMAT)
	$(call say,LINK,$@)
	$(Q)clang -fsanitize=fuzzer,$(FUZZ_SAN) -pthread $^ -o $@ $(FORMAT_LIBS) -linih

.PHONY: fuzz-deps
fuzz-deps:
	$(Q)tools/deps $(TIDY_PACKAGES)

fuzz: fuzz-deps $(FUZZERS)
	$(Q)FUZZ_SECONDS=$(FUZZ_SECONDS) tests/fuzz/run $(or $(T),$(notdir $(FUZZERS)))

# Plays SEEDS worlds from seed FROM on, on all cores; ends with "N passed, N failed".
SEEDS ?= 1000
FROM ?= 1
sim: $(BUILD)/tests/sim/campaign
	$(Q)$(BUILD)/tests/sim/campaign --from $(FROM) --seeds $(SEEDS)

# Every proof for its share of HOURS; T=word: only those. Ends with a table and "N proofs, N failed".
HOURS ?= 1
soak: tests
	$(Q)BUILD=$(BUILD) tests/soak/run --hours $(HOURS) $(T)

# Saves 10,000 times from devices that are late, overwriting what was saved behind each fence; minutes.
stress: all $(BUILD)/tests/fault/overwrite $(STANDINS)
	$(Q)BUILD=$(BUILD) LARDER_STRESS_SAVES=$(or $(SAVES),10000) $(BUILD)/tests/fault/overwrite

tidy:
	$(Q)tools/deps $(TIDY_PACKAGES)
	$(Q)tests/tidy/run

# Trains, kills a rank in the middle of a save, resumes on more ranks, and compares the weights.
demo: all
	$(Q)tools/demo/run $(BUILD)

# What this machine can do, and how near larder comes. BENCH_ARGS: for all but limits and codec, such as --bytes 2G.
bench: all
	$(Q)for what in limits codec "save $(BENCH_ARGS)" "restore $(BENCH_ARGS)" "feed $(BENCH_ARGS)"; do \
	    echo "larder bench $$what" && $(BUILD)/larder bench $$what && echo || exit 1; done

# Codecs on a published model's weights and on a trained optimiser's state.
bench-weights: all
	$(Q)BUILD=$(BUILD) tests/bench/weights

# A checkpoint by larder and by its peers, to the same disk. PEERS_ARGS: such as --bytes 2G --json.
bench-peers: all
	$(Q)BUILD=$(BUILD) tests/bench/peers $(PEERS_ARGS)

# What the feed is meant to reach, as ratios. BENCH_ARGS: of tests/bench/feed.
.PHONY: bench-feed
bench-feed: all
	$(Q)BUILD=$(BUILD) tests/bench/feed $(BENCH_ARGS)

# The same files by larderd and by nginx, which is installed for it. BENCH_ARGS: of tests/bench/nginx.
.PHONY: bench-nginx
bench-nginx: all
	$(Q)tools/deps nginx-light curl
	$(Q)BUILD=$(BUILD) tests/bench/nginx $(BENCH_ARGS)

MANUALS := $(wildcard tools/*.[158] server/*.[158] client/*.[1358])
VERSION = $(shell sed -n 's/.*LARDER_VERSION_STRING *"\(.*\)"/\1/p' format/version.h)
install: all
	$(Q)install -d '$(DESTDIR)$(PREFIX)/bin' '$(DESTDIR)$(PREFIX)/sbin' '$(DESTDIR)$(PREFIX)/include' \
	    '$(DESTDIR)$(PREFIX)/lib/pkgconfig' $(foreach s,1 3 5 8,'$(DESTDIR)$(PREFIX)/share/man/man$(s)')
	$(Q)install -m 755 $(BUILD)/larder '$(DESTDIR)$(PREFIX)/bin/larder'
	$(Q)install -m 755 $(BUILD)/larderd '$(DESTDIR)$(PREFIX)/sbin/larderd'
	$(Q)install -m 755 $(BUILD)/liblarder.so '$(DESTDIR)$(PREFIX)/lib/liblarder.so.0'
	$(Q)ln -sf liblarder.so.0 '$(DESTDIR)$(PREFIX)/lib/liblarder.so'
	$(Q)install -m 644 client/larder.h '$(DESTDIR)$(PREFIX)/include/larder.h'
	$(Q)sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@VERSION@|$(VERSION)|' client/larder.pc.in \
	    >'$(DESTDIR)$(PREFIX)/lib/pkgconfig/larder.pc'
	$(Q)for page in $(MANUALS); do \
	    install -m 644 $$page "$(DESTDIR)$(PREFIX)/share/man/man$${page##*.}/" || exit 1; done
	$(Q)[ -n '$(DESTDIR)' ] || ldconfig 2>/dev/null || true

uninstall:
	$(Q)rm -f '$(DESTDIR)$(PREFIX)/bin/larder' '$(DESTDIR)$(PREFIX)/sbin/larderd' \
	    '$(DESTDIR)$(PREFIX)/lib/liblarder.so.0' '$(DESTDIR)$(PREFIX)/lib/liblarder.so' \
	    '$(DESTDIR)$(PREFIX)/include/larder.h' '$(DESTDIR)$(PREFIX)/lib/pkgconfig/larder.pc' \
	    $(foreach page,$(MANUALS),'$(DESTDIR)$(PREFIX)/share/man/man$(lastword $(subst ., ,$(page)))/$(notdir $(page))')

clean:
	$(Q)rm -rf build

-include $(shell find $(BUILD)/obj build/fuzz/obj -name '*.d' 2>/dev/null)
