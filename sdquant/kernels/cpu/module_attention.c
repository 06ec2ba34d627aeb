/* What Python calls for attention. Numbers and addresses come as bytes of int64, in the order of kernels/sdpa.py. */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <string.h>

#include "attention.h"
#include "form.h"
#include "module_attention.h"

static Rows rows_at(const int64_t *n) { return (Rows){(uint16_t *)(intptr_t)n[0], {n[1], n[2], n[3]}}; }

PyObject *py_attend(PyObject *module, PyObject *bytes) {
    enum { NUMBERS = 23 };
    char *from;
    Py_ssize_t size;
    int64_t n[NUMBERS];
    double scale;
    (void)module;
    if (PyBytes_AsStringAndSize(bytes, &from, &size) < 0) return NULL;
    if (size != sizeof n) {
        PyErr_SetString(PyExc_ValueError, "other numbers are wanted");
        return NULL;
    }
    memcpy(n, from, sizeof n);
    memcpy(&scale, n + 20, sizeof scale);
    int (*run)(const Attention *attention, int64_t start, int64_t stop) = NULL;
#ifdef AMX
    if (kernels() == &amx_kernels) run = attend_amx;
#endif
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__)) /* as avx512.h has it */
    if (kernels() == &avx512_kernels) run = attend_avx512;
#endif
    if (run) {
        const Attention attention = {rows_at(n), rows_at(n + 4), rows_at(n + 8), rows_at(n + 12),
                                     n[16],      n[17],          n[18],          n[19],           (float)scale};
        int done;
        Py_BEGIN_ALLOW_THREADS
        done = run(&attention, n[21], n[22]);
        Py_END_ALLOW_THREADS
        if (!done) return PyErr_NoMemory();
        Py_RETURN_NONE;
    }
    PyErr_SetString(PyExc_RuntimeError, "no attention for this instruction set");
    return NULL;
}
