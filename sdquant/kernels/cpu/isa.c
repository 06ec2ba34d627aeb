/* Which kernels this machine runs. */
#include "form.h"
#include "int8.h"

#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__)) /* as avx2.h has it */
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

#ifdef X86
static int runs_int8(const Int8 *one) {
    if (!one || one == &avx2_int8) return 1; /* with the kernels of the same name */
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
#else
static int runs_int8(const Int8 *one) { return !one; }
#endif

/* The best first. */
static const struct {
    const char *name;
    const Kernels *kernels;
    const Int8 *int8; /* NULL: torch's */
} ALL[] = {
#ifdef AMX
    {"amx", &amx_kernels, &amx_int8},
#endif
#ifdef X86
    {"avx512bf16", &avx512_kernels, &avx512_int8},
    {"avx512vnni", &avx2_kernels, &avx512_int8}, /* without instructions for bf16 */
    {"avx2", &avx2_kernels, &avx2_int8},
#endif
    {"portable", &portable_kernels, 0},
};

static size_t chosen = sizeof ALL / sizeof *ALL; /* none yet */

int choose(const char *name) {
    for (size_t i = 0; i < sizeof ALL / sizeof *ALL; i++)
        if (runs(ALL[i].kernels) && runs_int8(ALL[i].int8) && (!*name || !strcmp(ALL[i].name, name))) {
            chosen = i;
            return 1;
        }
    return 0;
}

static size_t now(void) {
    if (chosen == sizeof ALL / sizeof *ALL) choose("");
    return chosen;
}

const Kernels *kernels(void) { return ALL[now()].kernels; }

const Int8 *int8_kernels(void) { return ALL[now()].int8; }

int amd(void) {
#ifdef X86
    return __builtin_cpu_is("amd") != 0;
#else
    return 0;
#endif
}
