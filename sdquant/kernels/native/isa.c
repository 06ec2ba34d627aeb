/* Which kernels this machine runs. */
#include "form.h"

#include <string.h>

#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#define X86 1
#endif

#ifdef X86
#include <cpuid.h>

/* Which __builtin_cpu_supports knows in later compilers only. */
static int f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

#ifdef AMX
#include <sys/syscall.h>
#include <unistd.h>

enum { ASK_PERMISSION = 0x1023, TILE_DATA = 18 }; /* arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) */

/* Whether this machine has AMX and the system lets this process use it. */
static int amx(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    const int bf16 = d >> 22 & 1, tiles = d >> 24 & 1, int8 = d >> 25 & 1;
    return bf16 && tiles && int8 && !syscall(SYS_arch_prctl, ASK_PERMISSION, TILE_DATA);
}
#endif

static int runs(const Kernels *one) {
#ifdef X86
#ifdef AMX
    if (one == &amx_kernels) return runs(&avx512_kernels) && __builtin_cpu_supports("avx512vnni") && amx();
#endif
    if (one == &avx512_kernels)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
    if (one == &avx2_kernels) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c();
#endif
    return one == &portable_kernels;
}

static const Kernels *const ALL[] = {
#ifdef AMX
    &amx_kernels,
#endif
#ifdef X86
    &avx512_kernels,
    &avx2_kernels,
#endif
    &portable_kernels,
};

static const Kernels *chosen = 0;

int choose(const char *name) {
    for (size_t i = 0; i < sizeof ALL / sizeof *ALL; i++)
        if (runs(ALL[i]) && (!*name || !strcmp(ALL[i]->name, name))) {
            chosen = ALL[i];
            return 1;
        }
    return 0;
}

const Kernels *kernels(void) {
    if (!chosen) choose("");
    return chosen;
}

int amd(void) {
#ifdef X86
    return __builtin_cpu_is("amd") != 0;
#else
    return 0;
#endif
}
