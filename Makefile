# SPDX-License-Identifier: Apache-2.0
# larder: one Makefile. `make help` lists what can be asked.
#   V=1                      shows the commands
#   SAN=address,undefined    builds and checks under sanitizers, in a folder of its own; SAN=thread likewise
#   CC=clang                 the other compiler
#   PREFIX, DESTDIR          where `make install` puts things

PREFIX ?= /usr/local
MULTIARCH := lib
BUILD ?= build$(if $(SAN),/san-$(subst $(comma),-,$(SAN)))
comma := ,
ifeq ($(origin CC),default)
CC := gcc
endif
Q := $(if $(V),,@)
say = $(if $(V)$(findstring s,$(firstword -$(MAKEFLAGS))),,@printf '  %-5s %s\n' $(1) $(2))

PACKAGES := liburing-dev libzstd-dev libssl-dev libxxhash-dev libjansson-dev libinih-dev libcmocka-dev \
            gcc make pkg-config python3 python3-pytest mandoc openssl iproute2
TIDY_PACKAGES := clang clang-format cppcheck libclang-rt-dev

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
DEMO := $(patsubst %.c,$(BUILD)/%,$(wildcard tools/demo/*.c))
PROGRAMS := $(if $(wildcard server/main.c),$(BUILD)/larderd) $(if $(wildcard tools/larder.c),$(BUILD)/larder) \
            $(if $(wildcard client/larder.map),$(BUILD)/liblarder.so) $(DEMO)

.PHONY: all check demo bench fuzz sim tidy install uninstall deps clean help tests
.SUFFIXES:
.SECONDARY:

all: deps-quick $(PROGRAMS)

help:
	@sed -n 's/^# *//p' Makefile | head -8
	@echo 'targets: all check demo bench fuzz sim tidy install uninstall deps clean'

# Installs what is missing, saying which; as root or through sudo.
deps:
	$(Q)tools/deps $(PACKAGES) $(TIDY_PACKAGES)
.PHONY: deps-quick
deps-quick:
	$(Q)tools/deps $(PACKAGES)

$(BUILD)/obj/%.o: %.c | deps-quick
	$(call say,CC,$<)
	$(Q)mkdir -p $(@D)
	$(Q)$(COMPILE) -c $< -o $@

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

$(BUILD)/tools/demo/%: $(BUILD)/obj/tools/demo/%.o $(BUILD)/liblarder.so
	$(call say,LINK,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(LINK) $< -o $@ -L$(BUILD) -llarder -Wl,-rpath,'$$ORIGIN/../..' -lcrypto -lm

# Every file below tests/unit and tests/fault is a program of its own; it may use every layer.
$(BUILD)/tests/%: $(BUILD)/obj/tests/%.o $(SUPPORT) $(SERVER) $(CLIENT) $(GPUDIRECT) $(FORMAT)
	$(call say,LINK,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(LINK) $^ -o $@ -lcmocka $(FORMAT_LIBS) $(SERVER_LIBS) $(CLIENT_LIBS)

tests: all $(UNIT)

# Ends with "N passed, N failed, N skipped".
check: tests
	$(Q)BUILD=$(BUILD) tests/run $(T)

# Each program of tests/fuzz runs for FUZZ_SECONDS on its corpus; ends with a count. T=word: only those.
FUZZ_SECONDS ?= 10
FUZZ_SAN := address,undefined
FUZZERS := $(patsubst tests/fuzz/%.c,build/fuzz/%,$(wildcard tests/fuzz/*.c))
FUZZ_FORMAT := $(patsubst %.c,build/fuzz/obj/%.o,$(call sources,format))

build/fuzz/obj/%.o: %.c | deps-quick
	$(call say,CC,$<)
	$(Q)mkdir -p $(@D)
	$(Q)clang -std=gnu17 $(CPPFLAGS) -O1 -g $(filter-out -Wno-%,$(WARNINGS)) -fsanitize=fuzzer-no-link,$(FUZZ_SAN) -fno-sanitize-recover=all \
	    -fno-omit-frame-pointer -pthread -MMD -MP -c $< -o $@

build/fuzz/%: build/fuzz/obj/tests/fuzz/%.o $(FUZZ_FORMAT)
	$(call say,LINK,$@)
	$(Q)clang -fsanitize=fuzzer,$(FUZZ_SAN) -pthread $^ -o $@ $(FORMAT_LIBS)

.PHONY: fuzz-deps
fuzz-deps:
	$(Q)tools/deps $(TIDY_PACKAGES)

fuzz: fuzz-deps $(FUZZERS)
	$(Q)FUZZ_SECONDS=$(FUZZ_SECONDS) tests/fuzz/run $(or $(T),$(notdir $(FUZZERS)))

tidy:
	$(Q)tools/deps $(TIDY_PACKAGES)
	$(Q)tests/tidy/run

clean:
	$(Q)rm -rf build

-include $(shell find $(BUILD)/obj build/fuzz/obj -name '*.d' 2>/dev/null)
