# attnd: every command. `make help` lists them.
#
#   build/attnd        the daemon          server/ + proto-json/ + text/ + kernels/
#   build/libattn.a    the kernels library kernels/, usable on its own (kernels/attention.h)
#   build/attn-bench   its benchmark       tests/bench/
#
# Switches, in the command line or the environment:
#   SAN=1     AddressSanitizer and UBSan, in build/san        TSAN=1  ThreadSanitizer, in build/tsan
#   CI=1      warnings are errors                             CUDA=0  leave out the CUDA devices even with nvcc
#   CUDA_ARCHS="80 90"  compute capabilities to make machine code for; each takes minutes (default 80 89 90; GPUs of 8.6
#                       and 8.7 run the code for 8.0)
#   CUDA_PTX=80         PTX for GPUs newer than CUDA_ARCHS (default 80; empty: none)
#   CUDA_QUICK=1        only see that the CUDA kernels compile, in half the time: Hopper's for bfloat16 alone, all others
#                       with nvcc -Ofc=max; the CUDA devices of such a build do not open
#   CC=clang  another compiler                                B=dir   another build folder
#   V=1       show the commands                               prefix=/usr DESTDIR=dir   where `make install` puts files
#
# An object depends on the headers that it includes (-MMD) and on the flags with which it was compiled ($B/flags). After
# any change a plain `make` therefore rebuilds only what the change affects, and `make clean` is never necessary.

VERSION := 0.1.0
DATE    := 2026-11-22
comma   := ,
CC      := $(if $(filter default undefined,$(origin CC)),gcc,$(CC))
ifeq ($(origin NVCC),undefined)
NVCC    := $(if $(shell command -v nvcc 2>/dev/null),nvcc,$(or $(wildcard /usr/local/cuda/bin/nvcc),nvcc))
endif
B       := build$(if $(SAN),/san)$(if $(TSAN),/tsan)

# ---- What is built ---------------------------------------------------------------------------------------------------

KERNELS_SRC := $(wildcard kernels/*.c kernels/cpu/*.c kernels/judge/*.c)
PROTO_SRC   := $(wildcard text/*.c proto-json/*.c)
SERVER_SRC  := $(wildcard server/*.c server/*/*.c)
UNIT_SRC    := $(wildcard tests/unit/*/test_*.c)
FUZZ_SRC    := $(wildcard tests/fuzz/fuzz_*.c)
BENCH_SRC   := $(wildcard tests/bench/attn-bench.c)
LOAD_SRC    := $(wildcard tests/load/*.c)

# CUDA is included if nvcc is found: machine code for the compute capabilities of CUDA_ARCHS, and PTX for later ones.
# The folder sm90 uses instructions that only Hopper has. C++ in the kernels' host code needs a few functions of
# libstdc++, which are linked statically. Files that take long to compile (CUDA_LONG) are started first, so that none of
# them is compiled alone at the end.
CUDA      ?= $(if $(shell command -v $(NVCC) 2>/dev/null),1,0)
CUDA_LONG := $(wildcard kernels/cuda/sm90/backward/backward*.cu kernels/cuda/sm90/wide*/*.cu kernels/cuda/sm90/forward/*.cu kernels/cuda/sm80/decode*.cu kernels/cuda/sm80/*ward.cu)
CUDA_SRC  := $(if $(filter 1,$(CUDA)),$(CUDA_LONG) $(filter-out $(CUDA_LONG),$(wildcard kernels/cuda/*/*.cu kernels/cuda/*/*/*.cu)))
CUDA_HOME ?= $(if $(CUDA_SRC),$(abspath $(dir $(realpath $(shell command -v $(NVCC))))..))
CUDA_LD   := $(if $(CUDA_SRC),-L$(CUDA_HOME)/lib64 -lcudart_static -l:libstdc++.a -ldl -lrt -lpthread -static-libgcc)
CUDA_ARCHS ?= 80 89 90
CUDA_PTX   ?= 80
# If there is a GPU but no nvcc, make prints a warning, because attnd then computes on the CPU. A GPU is recognised by
# its driver's files, or by vendor and class on the PCI bus.
GPU_FILES ?= /dev/nvidia0 /dev/nvidiactl /dev/dxg /proc/driver/nvidia/version
gpu_here    = $(or $(wildcard $(GPU_FILES)),$(shell cat $$(grep -ls '^0x10de' /sys/bus/pci/devices/*/vendor | sed 's|vendor$$|class|') /dev/null | grep '^0x030[02]'))
no_nvcc   := make: there is a GPU here but no nvcc, so attnd is built for the CPU alone. Install the CUDA toolkit (12 or later), or say where nvcc is: make NVCC=/opt/cuda/bin/nvcc. CUDA=0 says that the CPU is meant.
cuda_advice = $(if $(and $(filter file,$(origin CUDA)),$(filter 0,$(CUDA)),$(gpu_here)),echo "$(no_nvcc)",:)
gencode   := $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$a$(comma)code=sm_$a) $(foreach a,$(CUDA_PTX),-gencode arch=compute_$a$(comma)code=compute_$a)$(if $(CUDA_QUICK), -Ofc=max)
sm90      := -gencode arch=compute_90a,code=sm_90a

# ---- Flags -----------------------------------------------------------------------------------------------------------

CFLAGS   ?= -O2 -g
WARN     := -Wall -Wextra -Wshadow -Wpointer-arith -Wstrict-prototypes -Wmissing-prototypes -Wvla -Walloca -Wformat=2 $(if $(CI),-Werror)
HARDEN   := $(if $(SAN)$(TSAN),,-D_FORTIFY_SOURCE=2 -fstack-protector-strong)
SANFLAGS := $(if $(SAN),-fsanitize=address$(comma)undefined -fno-sanitize-recover=all -fno-omit-frame-pointer) $(if $(TSAN),-fsanitize=thread -fno-omit-frame-pointer)
# Saves a tenth of the program by leaving out data that nothing reads at run time: tables for unwinding (C has no
# exceptions; gdb reads those of -g), and single lines for the pointers that the loader adjusts (packed relocations need
# glibc 2.36, and on x86-64 binutils 2.38).
SMALL_C  := $(if $(SAN)$(TSAN),,-fno-asynchronous-unwind-tables)
SMALL_LD  = $(if $(x86),$(if $(SAN)$(TSAN),,-Wl$(comma)-z$(comma)pack-relative-relocs))
# Forbids fusing a product and a sum into one instruction, because each is to be rounded. On x86-64 the basic
# instructions have no fused form, so the option is unnecessary.
UNFUSED   = $(if $(x86),, -ffp-contract=off)
ALL_C     = -std=c11 -D_GNU_SOURCE -I. -DATTND_VERSION='"$(VERSION)"' -DATTND_DATE='"$(DATE)"' $(if $(CUDA_SRC),-DATTN_CUDA -DATTND_CUDA_ARCHS='"$(strip $(CUDA_ARCHS))"') -fPIC -pthread -MMD -MP $(WARN) $(HARDEN) $(SMALL_C)$(UNFUSED) $(SANFLAGS) $(CFLAGS)
LIBS     := -lmicrohttpd -luv -lcjson -lz -ldl
ALL_LD    = -pthread $(SANFLAGS) -Wl,-z,relro,-z,now $(SMALL_LD) $(LDFLAGS)
NVFLAGS   = -std=c++17 -O3 -lineinfo -I. -DATTN_CUDA --expt-relaxed-constexpr$(if $(CUDA_QUICK), -DATTN_CUDA_QUICK) -Xcompiler -fPIC,-Wall$(if $(CI),$(comma)-Werror) $(if $(CI),-Werror all-warnings)

# The compiler's target decides the architecture. It may differ from this machine: make CC=aarch64-linux-gnu-gcc CUDA=0.
machine    := $(firstword $(subst -, ,$(shell $(CC) -dumpmachine 2>/dev/null)))
x86        := $(filter x86_64,$(machine))
arm64      := $(filter aarch64,$(machine))

# The end of a file's name (_avx2 and so on) says which instructions the file may use. All other files run on any x86-64
# or arm64.
ISA_avx2   := $(if $(x86),-mavx2 -mfma -mf16c -mbmi2)
ISA_avx512 := $(if $(x86),-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vbmi -mavx2 -mfma -mf16c -mbmi2)
ISA_bf16   := $(if $(x86),$(ISA_avx512) -mavx512bf16)$(if $(arm64),-march=armv8.2-a+bf16)
ISA_amx    := $(if $(x86),$(ISA_bf16) -mamx-tile -mamx-bf16)
isa         = $(ISA_$(lastword $(subst _, ,$(basename $(notdir $1)))))

# Two files are compiled without ThreadSanitizer. reference.c has no threads, but simple loops in which the tests would
# spend most of their time. shim.c is loaded before ThreadSanitizer is ready.
unwatched   = $(if $(TSAN),$(if $(filter kernels/cpu/reference.c tests/http/shim.c,$1),-fno-sanitize=thread))

# Every object depends on $B/flags, a file with the flags of this build. The file is rewritten only if the flags change.
FLAGS := $(CC) $(ALL_C) $(ISA_amx)$(call unwatched,kernels/cpu/reference.c) $(if $(CUDA_SRC),$(NVCC) $(NVFLAGS) $(gencode) $(sm90))
ifneq ($(FLAGS),$(file <$B/flags))
$(shell mkdir -p $B)$(file >$B/flags,$(FLAGS))
endif

# ---- Building --------------------------------------------------------------------------------------------------------

OBJ = $(patsubst %,$B/%.o,$(basename $(filter %.c,$1))) $(patsubst %,$B/%.o,$(filter %.cu,$1))

# Prints a build step as its verb and its file, and as "N of STEPS" if make counted the steps. With V=1 make prints the
# command instead.
say = $(if $(V),,@echo "  $(if $(STEPS),$(eval begun += .)$(words $(begun)) of $(STEPS)  )$1 $(@:$B/%=%)" &&)

# Builds the target $1 with all cores, unless -j was given. make first counts the steps, so that it can show the
# progress.
jobs  = $(if $(filter -j% --jobserver%,$(MAKEFLAGS)),,-j$(shell nproc))
build = +@todo=$$($(MAKE) --no-print-directory -n V= STEPS= $1 2>/dev/null | grep '^echo "  '); \
	case $$todo in *'"  nvcc '*) echo "The CUDA kernels take minutes to compile; CUDA=0 leaves them out, for a server that computes on the CPU."; esac; \
	$(MAKE) --no-print-directory $(jobs) STEPS=$$(echo "$$todo" | grep -c .) $1

all: $B/attnd $B/libattn.a $(if $(BENCH_SRC),$B/attn-bench) ## build everything (the default)
	@$(cuda_advice)

# Compiles the vector kernels without libFuzzer's counters, with which clang takes ten minutes for them. No fuzz target
# computes attention.
ifneq ($(findstring fuzzer-no-link,$(SANFLAGS)),)
$B/kernels/cpu/simd%.o: override SANFLAGS :=
endif

$B/%.o: %.c $B/flags
	@mkdir -p $(@D)
	$(call say,cc)$(CC) $(ALL_C) $(call isa,$<) $(call unwatched,$<) -c -o $@ $<

$B/%.cu.o: %.cu $B/flags
	@mkdir -p $(@D)
	$(call say,nvcc)$(NVCC) $(NVFLAGS) $(or $($(notdir $(<D))),$(gencode)) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<

$B/server/routes/page.o: server/routes/index.html server/routes/docs.html
$B/server/routes/openapi.o: server/routes/openapi.json

# Compiles the kernels of sm90/. Spilled registers or serialised products fail the build.
$B/kernels/cuda/sm90/%.cu.o: kernels/cuda/sm90/%.cu kernels/cuda/sm90/check-ptxas.sh $B/flags
	@mkdir -p $(@D)
	$(call say,nvcc)sh kernels/cuda/sm90/check-ptxas.sh $@ $(NVCC) $(NVFLAGS) $(sm90) -Xptxas -v -MMD -MP -MF $(@:.o=.d) -c -o $@ $<

$B/libattn.a: $(call OBJ,$(KERNELS_SRC) $(CUDA_SRC))
	$(call say,ar)rm -f $@ && ar rcs $@ $^

$B/libproto.a: $(call OBJ,$(PROTO_SRC))
	$(call say,ar)rm -f $@ && ar rcs $@ $^

$B/libserver.a: $(call OBJ,$(filter-out server/main.c,$(SERVER_SRC)))
	$(call say,ar)rm -f $@ && ar rcs $@ $^

$B/attnd: $(call OBJ,server/main.c) $B/libserver.a $B/libproto.a $B/libattn.a
	$(call say,ld)$(CC) $(ALL_LD) -o $@ $^ $(CUDA_LD) $(LIBS) -lm

$B/attn-bench: $(call OBJ,$(BENCH_SRC)) $B/libproto.a $B/libattn.a
	$(call say,ld)$(CC) $(ALL_LD) -o $@ $^ $(CUDA_LD) -lcjson -lm

# Makes the manual page, the bash completion and the pkg-config file. A program that links the static library must also
# link what the library needs.
$B/share/attnd.1 $B/share/attnd.bash: $B/share/attnd.%: $B/attnd
	$(call say,gen)mkdir -p $(@D) && $< --help-$(if $(filter 1,$*),man,bash) >$@

prefix      = /usr/local
bindir      = $(prefix)/bin
libdir      = $(prefix)/lib
includedir  = $(prefix)/include
mandir      = $(prefix)/share/man
completions = $(prefix)/share/bash-completion/completions

define attn_pc
prefix=$(prefix)
libdir=$(libdir:$(prefix)/%=$${prefix}/%)
includedir=$(includedir:$(prefix)/%=$${prefix}/%)

Name: attn
Description: exact attention, forward and backward, on CPUs$(if $(CUDA_SRC), and NVIDIA GPUs)
Version: $(VERSION)
Cflags: -I$${includedir}
Libs: $(strip -L$${libdir} -lattn $(SANFLAGS) $(CUDA_LD) -pthread -lm)
endef

# Installs one file, and prints that. The argument is its mode, the file, and the path to install.
install_one = echo "  install $(DESTDIR)$(word 3,$1)" && install -D -m $(word 1,$1) $(word 2,$1) "$(DESTDIR)$(word 3,$1)"
INSTALLED = 755:$B/attnd:$(bindir)/attnd 644:$B/libattn.a:$(libdir)/libattn.a 644:kernels/attention.h:$(includedir)/attn/attention.h \
            644:$B/share/attn.pc:$(libdir)/pkgconfig/attn.pc 644:$B/share/attnd.1:$(mandir)/man1/attnd.1 644:$B/share/attnd.bash:$(completions)/attnd

# Benchmarks only the vector kernels of the CPU: build/simd-bench --only gemm amx
$B/simd-bench: $(call OBJ,tests/bench/simd-bench.c) $B/libattn.a
	$(call say,ld)$(CC) $(ALL_LD) -o $@ $^ $(CUDA_LD) -lm

# Compares the measured time of problems with the estimate: build/cost-bench --device cpu
$B/cost-bench: $(call OBJ,tests/bench/cost-bench.c) $B/libattn.a
	$(call say,ld)$(CC) $(ALL_LD) -o $@ $^ $(CUDA_LD) -lm

# attnd-fake: the daemon with devices that fail as a script says (kernels/fake/fake.c), for tests/http/test_faults.py.
# It is linked with its own dispatch.o, which has the fake backend, before the library, and so without the library's
# dispatch.o.
FAKE := $(patsubst %,$B/fake/%.o,kernels/dispatch kernels/fake/fake kernels/fake/truth)
$B/fake/%.o: %.c $B/flags
	@mkdir -p $(@D)
	$(call say,cc)$(CC) $(ALL_C) -DATTN_FAKE -c -o $@ $<

$B/tests/attnd-fake: $(call OBJ,server/main.c) $(FAKE) $B/libserver.a $B/libproto.a $B/libattn.a
	$(call say,ld)mkdir -p $(@D) && $(CC) $(ALL_LD) -o $@ $^ $(CUDA_LD) $(LIBS) -lm

# A library for LD_PRELOAD that causes faults which tests cannot cause from outside; see the head of shim.c.
$B/tests/shim.so: $B/tests/http/shim.o
	$(call say,ld)mkdir -p $(@D) && $(CC) -shared -o $@ $^ -ldl

# Unit tests: the source tests/unit/kernels/test_check.c becomes build/tests/unit/kernels/test_check
UNIT := $(patsubst %.c,$B/%,$(UNIT_SRC))
$B/tests/unit/%: $B/tests/unit/%.o $B/tests/unit/libtesting.a $B/libserver.a $B/libproto.a $B/libattn.a
	$(call say,ld)$(CC) $(ALL_LD) $(LD_$(@F)) -o $@ $(filter %.o,$^) $(filter %.a,$^) -lcmocka $(CUDA_LD) $(LIBS) -lm

# Code that several kernel tests share. It is an archive, so that a test program contains only what it calls.
$B/tests/unit/libtesting.a: $B/tests/unit/testing.o
	$(call say,ar)rm -f $@ && ar rcs $@ $^

# The test program test_backends consists of several files.
BACKENDS := $(patsubst %.c,$B/%.o,$(wildcard tests/unit/kernels/backends_*.c))
$B/tests/unit/kernels/test_backends: $(BACKENDS)

# test_answer works without connections: its own functions receive what the server would give libmicrohttpd.
LD_test_answer := $(addprefix -Wl$(comma)--wrap=,MHD_queue_response MHD_create_response_from_buffer MHD_create_response_from_callback)

# Some tests replace functions such as calloc(), to make memory fail or to change the time.
LD_test_loop   := -Wl$(comma)--wrap=calloc
LD_test_caches := -Wl$(comma)--wrap=calloc -Wl$(comma)--wrap=clock_gettime

# Tests that link the fake backend, whose devices fail as a script says.
UNIT_FAKE := kernels/test_fake kernels/test_judge server/test_devices server/test_cut server/test_loop server/test_memory server/test_prepare server/test_regions
$(UNIT_FAKE:%=$B/tests/unit/%): $B/tests/unit/%: $B/tests/unit/%.o $B/tests/unit/libtesting.a $(FAKE) $B/libserver.a $B/libproto.a $B/libattn.a
	$(call say,ld)$(CC) $(ALL_LD) $(LD_$(@F)) -o $@ $^ -lcmocka $(CUDA_LD) $(LIBS) -lm

# Tests on a GPU whether copies and kernels overlap (see the head of overlap.c), and measures the kernels' rates.
$B/tests/gpu/overlap $B/tests/gpu/rates: $B/tests/gpu/%: $B/tests/gpu/%.o $B/libattn.a
	$(call say,ld)$(CC) $(ALL_LD) -o $@ $^ $(CUDA_LD) -lm

# Tests each building block of the CUDA kernels by itself; see the head of blocks.cu. Built only for Hopper, like the
# folder sm90.
BLOCKS := $(wildcard tests/gpu/blocks*.cu)
$(BLOCKS:%=$B/%.o): gencode = $(sm90)
$B/tests/gpu/blocks: $(BLOCKS:%=$B/%.o)
	$(call say,ld)$(CC) $(ALL_LD) -o $@ $^ $(CUDA_LD) -lm

# The CUDA kernels on an emulator without a GPU: their sources are translated to C++ for the host's compiler (see
# tests/emulator/emulator.h). A build for 80 omits what only compute capability 9.0 has. The C files are compiled as
# with CUDA=0, except for the list of backends.
COMPUTE      := $(or $(ATTN_EMULATOR_COMPUTE),90)
EMU          := $B/$(COMPUTE)
EMU_SRC      := $(wildcard kernels/cuda/*/*.cu kernels/cuda/*/*/*.cu)
EMU_CC       := $(filter-out tests/emulator/$(if $(filter 80,$(COMPUTE)),,no_)sm90.cc,$(wildcard tests/emulator/*.cc))
EMU_BLOCKS   := $(if $(filter 80,$(COMPUTE)),,blocks)
EMU_KERNELS  := $(if $(filter 80,$(COMPUTE)),$(filter-out kernels/cuda/sm90/%,$(EMU_SRC)),$(EMU_SRC))
CUDA_HEADERS ?= $(patsubst %/cuda_runtime.h,%,$(firstword $(wildcard $(abspath $(dir $(realpath $(shell command -v $(NVCC))))../include)/cuda_runtime.h /usr/local/cuda/include/cuda_runtime.h)))
EMU_FLAGS     = -std=c++17 -O2 -g1 -march=x86-64-v3 -DATTN_CUDA -DEMULATED_ARCH=$(COMPUTE)0 -DATTN_KEPT_BYTES=600000 -DATTN_STEP_SECONDS=5e-5 -I$B -I. -isystem $(CUDA_HEADERS) -MMD -MP -Wall -Wextra $(if $(CI),-Werror)
EMU_WATCH    := -fsanitize=thread --param tsan-instrument-func-entry-exit=0 --param tsan-distinguish-volatile=1
EMU_OBJ      := $(EMU_KERNELS:%.cu=$(EMU)/%.o) $(EMU_CC:%.cc=$(EMU)/%.o) $B/emulated/kernels/dispatch.o

$(EMU)/flags: FORCE
	@mkdir -p $(@D) && echo '$(EMU_FLAGS)' | cmp -s - $@ || echo '$(EMU_FLAGS)' >$@
$B/kernels/cuda/translated: tests/emulator/translate.py $(BLOCKS) $(foreach d,kernels/cuda/* kernels/cuda/*/* tests/emulator/kernels/cuda/* tests/emulator/kernels/cuda/*/*,$(wildcard $d/*.cu $d/*.cuh $d/*.h))
	$(call say,py)python3 $< $B $(BLOCKS) && touch $@
$(addprefix $B/,$(EMU_SRC) $(BLOCKS) $(wildcard $(foreach x,h cuh,kernels/cuda/*/*.$x kernels/cuda/*/*/*.$x))): $B/kernels/cuda/translated ;
$(EMU)/%.o: $B/%.cu tests/emulator/device.h $(EMU)/flags
	@mkdir -p $(@D)
	$(call say,c++)g++ $(EMU_FLAGS) -ffp-contract=off -fno-strict-aliasing $(EMU_WATCH) -w -include tests/emulator/device.h -c -o $@ -x c++ $<
$(EMU)/tests/emulator/%.o: tests/emulator/%.cc $(EMU)/flags
	@mkdir -p $(@D)
	$(call say,c++)g++ $(EMU_FLAGS) -O3 -c -o $@ $<
FORCE:
$B/emulated/%.o: %.c $B/flags
	@mkdir -p $(@D)
	$(call say,cc)$(CC) $(ALL_C) -DATTN_CUDA -c -o $@ $<

$(EMU)/can_fail: tests/emulator/can_fail.cu $(EMU_CC:%.cc=$(EMU)/%.o)
	$(call say,c++)g++ $(EMU_FLAGS) -fno-strict-aliasing $(EMU_WATCH) -include tests/emulator/device.h -c -o $@.o -x c++ $< && g++ -o $@ $@.o $(filter %.o,$^)
$(EMU)/blocks: $(BLOCKS:%.cu=$(EMU)/%.o) $(EMU_CC:%.cc=$(EMU)/%.o)
	$(call say,ld)g++ -o $@ $^ -lm
$(EMU)/test_backends: $B/tests/unit/kernels/test_backends.o $(BACKENDS) $B/tests/unit/libtesting.a $(EMU_OBJ) $B/libattn.a
	$(call say,ld)g++ $(ALL_LD) -o $@ $^ -lcmocka -lm
$(EMU)/test_verify_lse: $B/tests/unit/kernels/test_verify_lse.o $B/tests/unit/libtesting.a $(EMU_OBJ) $B/libattn.a
	$(call say,ld)g++ $(ALL_LD) -o $@ $^ -lcmocka -lm
$(EMU)/attnd: $B/server/main.o $(EMU_OBJ) $B/libserver.a $B/libproto.a $B/libattn.a
	$(call say,ld)g++ $(ALL_LD) -o $@ $^ $(LIBS) -lm

# Small programs of tests/load: the source tests/load/upload.c becomes build/tests/load/upload
$B/tests/load/%: $B/tests/load/%.o
	$(call say,ld)$(CC) $(ALL_LD) -o $@ $^ -lmicrohttpd -lm

# Fuzz targets are built in two ways: with libFuzzer (clang, into $B/fuzz; see `make fuzz`), and with replay.c's main(),
# which runs a target on its corpus.
REPLAY := $(patsubst tests/fuzz/%.c,$B/tests/fuzz/replay_%,$(FUZZ_SRC))
$B/tests/fuzz/replay_%: $B/tests/fuzz/%.o $B/tests/fuzz/replay.o $B/libserver.a $B/libproto.a $B/libattn.a
	$(call say,ld)$(CC) $(ALL_LD) -o $@ $^ $(CUDA_LD) $(LIBS) -lm
$B/tests/fuzz/libfuzzer_%: $B/tests/fuzz/%.o $B/libserver.a $B/libproto.a $B/libattn.a
	$(call say,ld)$(CC) -fsanitize=fuzzer $(ALL_LD) -o $@ $^ $(CUDA_LD) $(LIBS) -lm

.SECONDARY:
-include $(shell find $(addprefix $B/,server text proto-json kernels tests fake emulated 80 90) -name '*.d' 2>/dev/null)

# ---- Commands --------------------------------------------------------------------------------------------------------
# Each begins by installing what it needs and lacks (tests/setup.sh), so it works on a machine that has only make.

PYTHON = $(shell sh tests/setup.sh python)
# Environment of the Python tests: the programs to test, and how many times slower than usual they may be. A server
# whose device hangs ends without joining the device's thread, so a leak of that thread is no fault.
TESTENV = ATTND_BINARY=$(abspath $B/attnd) ATTND_FAKE=$(abspath $B/tests/attnd-fake) ATTND_SHIM=$(abspath $B/tests/shim.so) ATTND_BUILD=$(abspath build) ATTND_SLOWER=$(if $(SAN)$(TSAN),10,1)$(if $(TSAN), TSAN_OPTIONS=report_thread_leaks=0) PYTHONDONTWRITEBYTECODE=1$(if $(ATTND_SEEDS), ATTND_SEEDS=$(ATTND_SEEDS))
# PARTS=2 runs the tests in two processes at the same time (run_parts.sh).
PARTS  ?= 1
PYTEST  = cd tests && $(TESTENV) sh run_parts.sh $(PARTS) $(PYTHON) -m pytest $(PYTEST_ARGS)

run: ## build on all cores and serve on 127.0.0.1:8080 (CUDA=0: on the CPU alone; ARGS="--listen 0.0.0.0:9000" for other options)
	@sh tests/setup.sh run
	$(call build,$B/attnd)
	exec $B/attnd $(ARGS)

install: export ATTN_PC = $(attn_pc)
install: $B/attnd $B/libattn.a $B/share/attnd.1 $B/share/attnd.bash ## what was built, libattn.a with its header and attn.pc, man page, completion (prefix=/usr/local DESTDIR=)
	@printf '%s\n' "$$ATTN_PC" >$B/share/attn.pc
	@$(foreach f,$(INSTALLED),$(call install_one,$(subst :, ,$f)) &&) :
uninstall: ## remove what `make install` with the same prefix and DESTDIR put there
	rm -f $(foreach f,$(INSTALLED),"$(DESTDIR)$(lastword $(subst :, ,$f))")
	[ ! -d "$(DESTDIR)$(includedir)/attn" ] || rmdir "$(DESTDIR)$(includedir)/attn"

test: ## build and run all tests
	@sh tests/setup.sh test
	$(call build,all)
	@failed=; for part in unit fuzz-replay http-all; do $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; done; \
	if [ -n "$$failed" ]; then echo "make test: failed:$$failed"; exit 1; fi; echo "make test: all passed"
http-all: PARTS := 3
http-all: $B/attnd $B/tests/attnd-fake $B/tests/shim.so $B/attn-bench
	$(PYTEST) conformance differential evidence http

unit: $(UNIT) ## the C unit tests alone
	@sh tests/run_unit.sh $(call halves,$(filter %/test_backends,$(UNIT))) $(filter-out %/test_backends,$(UNIT))
	@$(if $(SAN)$(TSAN),,$(foreach program,$(filter %/test_backends,$(UNIT)),ATTN_BACKEND=paper sh tests/run_unit.sh $(call halves,$(program))))
	@$(if $(x86),$(if $(SAN)$(TSAN),,$(foreach program,$(filter %/test_backends,$(UNIT)),ATTN_CPU_ISA=bf16 ATTN_BRIEF=1 ATTN_THIN=8 sh tests/run_unit.sh $(call halves,$(program)))))
# Splits a test program that takes as long as all others together into two halves, which run at the same time.
halves = $(foreach n,1 2,$(1:%=%@$n/2))

http: $B/attnd $B/tests/attnd-fake $B/tests/shim.so $B/attn-bench ## the tests over HTTP alone (PYTEST_ARGS="-k limits")
	$(PYTEST) http

# Runs the daemon with another version of libmicrohttpd: 1.0.1 if 0.9.75 is installed, otherwise 0.9.75.
OTHER_MHD  = $(abspath build/tools/libmicrohttpd)
http-other: PARTS := 4
http-other: PYTEST_ARGS ?= -k "framing or headers or refused_bodies or fuzz or shutdown"
http-other: $B/attnd $B/tests/attnd-fake $B/tests/shim.so ## the HTTP tests of framing, heads, fuzz and shutdown with the libmicrohttpd that is not installed
	@sh tests/setup.sh library
	@if [ ! -e $(OTHER_MHD)/lib/libmicrohttpd.so.12 ]; then echo "make http-other: skipped: the other libmicrohttpd is not to be had (build/tools/mhd.log)"; else \
		sed -n 's/^#define MHD_VERSION/make http-other: libmicrohttpd/p' $(OTHER_MHD)/include/microhttpd.h; \
		for f in $$(grep -rl '<microhttpd.h>' server tests/load --include='*.c'); do $(CC) $(ALL_C) -I$(OTHER_MHD)/include -fsyntax-only -MF /dev/null $$f || exit 1; done; \
		export LD_LIBRARY_PATH=$(OTHER_MHD)/lib; ldd $B/attnd | grep -q $(OTHER_MHD) || exit 1; $(PYTEST) http; \
	fi

conformance: $B/attnd ## random problems against float64 over HTTP (ATTND_SEEDS=1,2,3 to repeat some)
	$(PYTEST) conformance

SECONDS ?= 60
differential: $B/attnd ## random problems over all options against NumPy in float64 for SECONDS=60 (ARGS="--seed 1 --case 7" for one)
	cd tests && $(TESTENV) $(PYTHON) differential/differential.py $(or $(ARGS),--seconds $(SECONDS))

evidence: $B/attnd ## can the check endpoint be trusted? Planted mistakes, right results, and what it says of them (EVIDENCE=all: 2691 problems; ARGS="--only alignment:7 --show")
	@sh tests/setup.sh test
	cd tests && $(TESTENV) $(PYTHON) evidence/evidence.py $(if $(filter all,$(EVIDENCE)),--all) $(ARGS)

fuzz-replay: $(REPLAY) ## feed every fuzz target its corpus
	@sh tests/run_fuzz.sh replay $(REPLAY)

FUZZ_SECONDS ?= 60
fuzz: ## run every fuzz target with libFuzzer (clang) for FUZZ_SECONDS=60 each
	@sh tests/setup.sh fuzz
	@$(MAKE) --no-print-directory B=build/fuzz CC=clang SAN=1 SANFLAGS="-fsanitize=address,undefined,fuzzer-no-link -fno-sanitize-recover=all -fno-omit-frame-pointer" fuzz-targets
	@sh tests/run_fuzz.sh $(FUZZ_SECONDS) $(patsubst tests/fuzz/%.c,build/fuzz/tests/fuzz/libfuzzer_%,$(FUZZ_SRC))
fuzz-targets: $(patsubst tests/fuzz/%.c,$B/tests/fuzz/libfuzzer_%,$(FUZZ_SRC))

fuzz-http: $B/attnd ## requests that are a little wrong, over sockets, every 200 verified (SECONDS=600, or COUNT=3000; SEED=7; ONLY=7:2:413)
	@sh tests/setup.sh test
	cd tests && $(TESTENV) $(PYTHON) fuzz_http/fuzz.py $(if $(SECONDS),--seconds $(SECONDS)) $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

walk: $B/attnd $B/tests/attnd-fake ## a random walk on caches, each answer held against NumPy (ARGS="--operations 10000 --seed 1"; SAN=1, TSAN=1)
	@sh tests/setup.sh test
	cd tests && $(TESTENV) $(PYTHON) http/caches.py $(ARGS)

bench: ## time the kernels and the codec (ARGS="--sweep paper --tokens 2048")
	@sh tests/setup.sh run
	@$(MAKE) --no-print-directory $B/attn-bench
	$B/attn-bench $(ARGS)

load: ## drive a server with wrk: small, medium and large bodies (ARGS="--seconds 5 --sizes small")
	@sh tests/setup.sh load
	@$(MAKE) --no-print-directory $B/attnd
	$(TESTENV) python3 tests/load/load.py $(ARGS)

compare: ## the same beside a Python server of the same contract (PEER_PYTHON=...; tests/load/requirements.txt)
	@sh tests/setup.sh load
	@$(MAKE) --no-print-directory $B/attnd $B/tests/load/bare_mhd
	$(TESTENV) python3 tests/load/compare.py $(ARGS)

upload: ## rate and memory of one large upload, beside a bare libmicrohttpd that discards the same bytes
	@sh tests/setup.sh load
	@$(MAKE) --no-print-directory $B/attnd $B/tests/load/upload $B/tests/load/bare_mhd
	$(TESTENV) python3 tests/load/upload.py $(ARGS)

growth: ## time against Sq and against body size, drawn into tests/load/growth.svg
	@sh tests/setup.sh load
	@$(MAKE) --no-print-directory $B/attnd
	$(TESTENV) python3 tests/load/growth.py $(ARGS)

observe: ## a real Prometheus on the server: alert rules, and every query of the Grafana dashboard
	@sh tests/setup.sh deploy
	@$(MAKE) --no-print-directory $B/attnd $B/tests/attnd-fake
	$(TESTENV) python3 tests/deploy/observability.py $(ARGS)

scaleout: ## three servers behind NGINX and Envoy under load, one of them ended and killed
	@sh tests/setup.sh deploy
	@$(MAKE) --no-print-directory $B/attnd
	$(TESTENV) python3 tests/deploy/scaleout.py $(ARGS)

check-deploy: $B/attnd ## every file of deploy/ and the Dockerfile by the tool that reads it; the commands of deploy/README.md
	@ATTND_BINARY=$(abspath $B/attnd) tests/deploy/check.sh

image: ## build the Dockerfile's images without Docker (root, buildah), run them, end them under load (ARGS="cpu test")
	tests/deploy/image.sh $(ARGS)
.PHONY: check-deploy image

gpu: ## everything that needs a GPU: kernels against float64, conformance over HTTP, equal bits (skipped without one)
	@sh tests/setup.sh test
	@$(MAKE) --no-print-directory all $B/tests/unit/kernels/test_backends $B/tests/unit/kernels/test_verify_lse $(if $(CUDA_SRC),$B/tests/gpu/blocks) $B/tests/gpu/overlap
	bash tests/gpu/run.sh $B

emulate: ## the CUDA kernels without a GPU, in an emulator that finds mistakes of ordering; minutes (ATTN_RANDOM_COUNT=40)
	@if [ ! -e '$(CUDA_HEADERS)/cuda_runtime.h' ] || ! grep -qw avx2 /proc/cpuinfo; then \
		echo "make emulate: skipped: it needs the headers of CUDA 12 or later (CUDA_HEADERS=/usr/local/cuda/include) and an x86-64 CPU with AVX2"; \
	else \
		sh tests/setup.sh test && \
		$(MAKE) --no-print-directory B=$B/emulator CUDA=0 SAN= TSAN= $(addprefix $B/emulator/$(COMPUTE)/,can_fail $(EMU_BLOCKS) test_backends test_verify_lse attnd) && \
		$B/emulator/$(COMPUTE)/can_fail && \
		ATTN_BACKEND=cuda ATTN_BRIEF=$${ATTN_BRIEF-1} UNIT_TIMEOUT=3600 sh tests/run_unit.sh \
			$(addprefix $B/emulator/$(COMPUTE)/,$(EMU_BLOCKS) test_verify_lse) $(call halves,$B/emulator/$(COMPUTE)/test_backends) && \
		{ [ $(COMPUTE) = 80 ] || ATTN_CUDA_FAMILY=sm90_f8 ATTN_TESTS='test_float8*' ATTN_BACKEND=cuda sh tests/run_unit.sh $(call halves,$B/emulator/$(COMPUTE)/test_backends); } && \
		for d in 64 128; do ATTN_EMULATOR_REPAIRS=none ATTN_GRID_D=$$d ATTN_TESTS='test_grid*' ATTN_BACKEND=cuda sh tests/run_unit.sh \
			$B/emulator/$(COMPUTE)/test_backends || exit 1; done && \
		ATTN_EMULATOR_REPAIRS=none ATTN_TESTS='test_scores*' ATTN_BACKEND=cuda sh tests/run_unit.sh $B/emulator/$(COMPUTE)/test_backends && \
		ATTND_EMULATED=$(abspath $B/emulator/$(COMPUTE)/attnd) $(MAKE) --no-print-directory http CUDA=0 PYTEST_ARGS='-q -k test_emulated'; \
	fi

arm64: ## unit tests and a part of conformance for arm64, cross-compiled and run by QEMU; three minutes (skipped where it cannot be had)
	@case '$(shell uname -m)' in \
	aarch64) echo "make arm64: skipped: this machine is one, and make test runs all tests on it" ;; \
	*) sh tests/setup.sh arm64 || echo "make arm64: not all of its packages are here"; sh tests/arm64.sh ;; esac

fresh: ## the two commands of the README in a bare Debian (root, debootstrap; FRESH=bookworm)
	bash tests/fresh/run.sh $(FRESH)

C_FILES = $(shell find server text proto-json kernels tests -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cc' | sort)
CLANG_FORMAT ?= $(or $(wildcard build/venv/bin/clang-format),clang-format)
format: ## rewrite the C sources in the project's style (clang-format 14)
	$(CLANG_FORMAT) -i $(C_FILES)

check-format: ## say which C sources are not in that style
	@if $(CLANG_FORMAT) --version 2>/dev/null | grep -q 'version 14\.'; then $(CLANG_FORMAT) --dry-run -Werror $(C_FILES) && echo "check-format: $(words $(C_FILES)) files"; \
	else echo "check-format: skipped: clang-format 14 is not here (sh tests/setup.sh test fetches it from PyPI)"; fi

check-layers: ## do folders depend on each other only as they may, and nothing in a circle? (calls are read from existing object files)
	@python3 tests/layers.py $B

check-shape: ## how long are functions, files and comments, and how much do sibling kernels repeat of each other?
	@python3 tests/shape.py

print-advice:
	@$(cuda_advice)

print-cuda:
	@echo '$(if $(CUDA_SRC),yes,no)'

clean: ## remove everything that was built
	rm -rf build

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: all run install uninstall test unit http http-all http-other conformance differential evidence fuzz-replay fuzz fuzz-targets fuzz-http walk bench load compare upload growth observe scaleout gpu emulate arm64 fresh format check-format check-layers check-shape print-cuda print-advice clean help
