/* What Python calls for products in 8-bit integers. Numbers and addresses come as bytes of int64, in the order of
   int8.py and its neighbours. */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <float.h>
#include <math.h>

#include "expand.h"
#include "floats.h"
#include "int8.h"
#include "module_int8.h"
#include "narrow.h"
#include "patches.h"
#include "rotate.h"

static const char FORM[] = "sdquant.kernels.cpu.Form";

/* `wanted` numbers; NULL, with the error set, where they are not given. */
static const int64_t *numbers(PyObject *bytes, Py_ssize_t wanted) {
    char *from;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(bytes, &from, &size) < 0) return NULL;
    if (size != wanted * (Py_ssize_t)sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "other numbers are wanted");
        return NULL;
    }
    return (const int64_t *)from;
}

static void *address(int64_t number) { return (void *)(intptr_t)number; }

enum { WEIGHTS = 7, SOURCES = 24, TARGETS = 10, BRANCH = 6 };

typedef struct {
    Weight weight;
    Parts parts;
} Held;

/* From (capsule of a form, bytes of numbers): the weight, and where the `count` numbers after its own begin. */
static const int64_t *weight_and(PyObject *args, int count, Held *held) {
    PyObject *capsule, *bytes;
    if (!PyArg_ParseTuple(args, "OO", &capsule, &bytes)) return NULL;
    const int64_t *n = numbers(bytes, WEIGHTS + count);
    const Form *form = n ? PyCapsule_GetPointer(capsule, FORM) : NULL;
    if (!form) return NULL;
    held->parts = (Parts){
        .codes = address(n[0]), .scale = address(n[1]), .nested = address(n[2]), .zeros = address(n[3]), .shift = address(n[4])};
    held->weight = (Weight){form, &held->parts, (int)n[5], n[6]};
    return n + WEIGHTS;
}

static Source source_of(const int64_t *n) {
    return (Source){(Type)n[0], address(n[1]), n[2], n[3], (int)n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11],
                    {n[12], n[13]}, {n[14], n[15]}, {n[16], n[17]}, address(n[18]), (int)n[19], address(n[20]), n[21],
                    n[22], address(n[23]), 0, 0};
}

static Target target_of(const int64_t *n) {
    return (Target){(Type)n[0], address(n[1]), n[2], n[3], n[4], n[5], address(n[6]), n[7], (int)n[8], address(n[9]), 0};
}

/* Of activations and results of a type. */
static Branch branch_of(Type type, int64_t inputs, const int64_t *n) {
    return (Branch){type,          inputs,        n[0], address(n[1]), (int)n[2] & 1, (int)n[2] >> 1,
                    address(n[3]), address(n[4]), address(n[5])};
}

int beside_of(PyObject *bytes, Type type, int64_t inputs, Beside *beside) {
    const int64_t *n = numbers(bytes, 2 + BRANCH);
    if (n) *beside = (Beside){{address(n[0]), address(n[1])}, branch_of(type, inputs, n + 2)};
    return n != NULL;
}

/* Where there is one: `rank` is not 0. */
static const Branch *if_any(const Branch *branch) { return branch->rank ? branch : NULL; }

PyObject *py_int8_sizes(PyObject *module, PyObject *columns) {
    const int64_t wanted = PyLong_AsLongLong(columns);
    (void)module;
    if (PyErr_Occurred()) return NULL;
    if (!int8_kernels()) Py_RETURN_NONE;
    return Py_BuildValue("LLLLis", (long long)padded(wanted), (long long)panel_bytes(wanted),
                         (long long)spare_bytes(wanted), (long long)most_rows(wanted), int8_kernels()->tall,
                         int8_kernels()->name);
}

PyObject *py_int8_lies_right(PyObject *module, PyObject *args) {
    Held held;
    (void)module;
    const int64_t *n = weight_and(args, 0, &held);
    if (!n) return NULL;
    return PyBool_FromLong(lies_right(&held.weight));
}

PyObject *py_int8_stage(PyObject *module, PyObject *args) {
    Held held;
    (void)module;
    const int64_t *n = weight_and(args, 6, &held);
    if (!n) return NULL;
    Py_BEGIN_ALLOW_THREADS
    stage(&held.weight, n[0], n[1], address(n[2]), address(n[3]), address(n[4]), address(n[5]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_int8_largest(PyObject *module, PyObject *bytes) {
    const int64_t *n = numbers(bytes, 5);
    (void)module;
    if (!n) return NULL;
    Py_BEGIN_ALLOW_THREADS
    int8_kernels()->largest((Type)n[0], address(n[1]), n[2], n[3], address(n[4]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_int8_codes(PyObject *module, PyObject *args) {
    PyObject *bytes;
    Codes how = {.kind = INTEGERS};
    (void)module;
    if (!PyArg_ParseTuple(args, "fffLO", &how.bound, &how.low, &how.high, &how.known, &bytes)) return NULL;
    const int64_t *n = numbers(bytes, 6);
    if (!n) return NULL;
    Py_BEGIN_ALLOW_THREADS
    int8_kernels()->codes((Type)n[0], address(n[1]), n[2], n[3], &how, address(n[4]), address(n[5]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_int8_numbers(PyObject *module, PyObject *args) {
    PyObject *bytes;
    Codes how = {.known = -1};
    int kind, decoded;
    (void)module;
    if (!PyArg_ParseTuple(args, "fffipO", &how.bound, &how.low, &how.high, &kind, &decoded, &bytes)) return NULL;
    const int64_t *n = numbers(bytes, 6);
    if (!n) return NULL;
    how.kind = (Kind)kind;
    Py_BEGIN_ALLOW_THREADS
    int8_kernels()->numbers((Type)n[0], address(n[1]), n[2], n[3], &how, decoded, address(n[4]), address(n[5]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_int8_last(PyObject *module, PyObject *bytes) {
    const int64_t *n = numbers(bytes, 7);
    (void)module;
    if (!n) return NULL;
    Py_BEGIN_ALLOW_THREADS
    int8_kernels()->last((Type)n[0], address(n[1]), n[2], n[3], n[4], n[5], address(n[6]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_int8_quantize(PyObject *module, PyObject *bytes) {
    const int64_t *n = numbers(bytes, SOURCES + BRANCH + 7);
    (void)module;
    if (!n) return NULL;
    Source from = source_of(n);
    n += SOURCES;
    const Branch branch = branch_of(from.type, from.columns, n);
    from.branch = if_any(&branch);
    n += BRANCH;
    Py_BEGIN_ALLOW_THREADS
    quantize_groups(&from, 0, n[0], n[5], n[6], address(n[1]), address(n[2]), address(n[3]), address(n[4]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_int8_rows(PyObject *module, PyObject *args) {
    Held held;
    (void)module;
    const int64_t *n = weight_and(args, SOURCES + TARGETS + BRANCH + 6, &held);
    if (!n) return NULL;
    Source from = source_of(n);
    Target to = target_of(n + SOURCES);
    n += SOURCES + TARGETS;
    const Branch branch = branch_of(from.type, from.columns, n);
    from.branch = to.branch = if_any(&branch);
    n += BRANCH;
    Py_BEGIN_ALLOW_THREADS
    multiply_rows(&held.weight, &from, n[0], n[1], address(n[2]), address(n[3]), address(n[4]), &to, address(n[5]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_int8_panels(PyObject *module, PyObject *args) {
    Held held;
    (void)module;
    const int64_t *n = weight_and(args, TARGETS + BRANCH + 7, &held);
    if (!n) return NULL;
    Target to = target_of(n);
    n += TARGETS;
    const Branch branch = branch_of(to.type, held.weight.form->columns, n);
    to.branch = if_any(&branch);
    n += BRANCH;
    Py_BEGIN_ALLOW_THREADS
    multiply_panels(&held.weight, n[0], n[1], n[2], address(n[3]), address(n[4]), address(n[5]), &to, address(n[6]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_rotate(PyObject *module, PyObject *bytes) {
    const int64_t *n = numbers(bytes, 7);
    (void)module;
    if (!n) return NULL;
    Py_BEGIN_ALLOW_THREADS
    rotate_rows((Type)n[0], address(n[1]), n[2], n[3], n[4], address(n[5]), address(n[6]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_rotate_within(PyObject *module, PyObject *bytes) {
    const int64_t *n = numbers(bytes, 8);
    (void)module;
    if (!n) return NULL;
    Py_BEGIN_ALLOW_THREADS
    rotate_rows_within((Type)n[0], address(n[1]), n[2], n[3], n[4], address(n[5]), address(n[6]), address(n[7]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_code_within(PyObject *module, PyObject *bytes) {
    const int64_t *n = numbers(bytes, 10);
    (void)module;
    if (!n) return NULL;
    Py_BEGIN_ALLOW_THREADS
    code_rows_within(address(n[0]), n[1], n[2], n[3], address(n[4]), address(n[5]), n[6], n[7], address(n[8]),
                     address(n[9]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_expand(PyObject *module, PyObject *bytes) {
    const int64_t *n = numbers(bytes, 13);
    (void)module;
    if (!n) return NULL;
    const Grouped from = {address(n[0]), n[1], n[2], address(n[3]), address(n[4]), address(n[5]), n[6], n[7], n[8]};
    Py_BEGIN_ALLOW_THREADS
    expand_rows(&from, n[9], n[10], address(n[11]), address(n[12]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Rows of `count` codes, `stride` bytes apart, to rows of `out`, `step` bytes apart. */
PyObject *py_by_turns(PyObject *module, PyObject *bytes) {
    const int64_t *n = numbers(bytes, 12);
    (void)module;
    if (!n) return NULL;
    const uint8_t *codes = address(n[0]);
    char *out = address(n[7]);
    Py_BEGIN_ALLOW_THREADS
    for (int64_t row = n[9]; row < n[10]; row++)
        kernels()->decode_by_turns(codes + row * n[1], n[2], (float)n[3], address(n[4]), address(n[5]), n[6], (Type)n[11],
                                   out + row * n[8]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* `down` of a low-rank branch, laid out, and what divides its inputs as `Divisors`, where there is memory for it; False
   where these kernels have no such type. */
PyObject *py_branch_lay(PyObject *module, PyObject *bytes) {
    const int64_t *n = numbers(bytes, 3 + BRANCH + 3);
    (void)module;
    if (!n) return NULL;
    const Narrow *narrow = kernels()->narrow;
    if (!narrow || !(narrow->types >> n[0] & 1)) Py_RETURN_FALSE;
    const Branch branch = branch_of((Type)n[0], n[1], n + 3);
    const int64_t *smooth = n + 3 + BRANCH; /* its type, itself, and where divisors go */
    float *by = address(smooth[2]), *reciprocal = by + branch.inputs;
    Py_BEGIN_ALLOW_THREADS
    if (n[2]) narrow->lay(&branch, address(n[2]));
    if (by) kernels()->widen(address(smooth[1]), (Type)smooth[0], 0, by, branch.inputs);
    for (int64_t i = 0; i < branch.inputs && by; i++) reciprocal[i] = 1.0f / by[i];
    for (int64_t i = 0; i < branch.inputs && by && branch.type == BF16; i++)
        if (bits_of(by[i]) & 0x1fff || !(fabsf(reciprocal[i]) >= FLT_MIN && fabsf(reciprocal[i]) <= FLT_MAX))
            reciprocal[i] = NAN;
    Py_END_ALLOW_THREADS
    Py_RETURN_TRUE;
}

/* Both products with it, for rows of x; results are added to those of `out`. */
PyObject *py_branch(PyObject *module, PyObject *bytes) {
    const int64_t *n = numbers(bytes, 6 + BRANCH);
    (void)module;
    if (!n) return NULL;
    const Narrow *narrow = kernels()->narrow;
    const Branch branch = branch_of((Type)n[0], n[1], n + 6);
    Py_BEGIN_ALLOW_THREADS
    narrow->down(&branch, address(n[2]), n[3], branch.between);
    narrow->up(&branch, branch.between, n[3], 0, n[4], address(n[5]), n[4]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_patches(PyObject *module, PyObject *bytes) {
    const int64_t *n = numbers(bytes, 18);
    (void)module;
    if (!n) return NULL;
    const Images from = {n[0], address(n[1]), n[2], n[3], n[4], n[5], n[6], n[7], n[8], {n[9], n[10]}, {n[11], n[12]},
                         {n[13], n[14]}};
    Py_BEGIN_ALLOW_THREADS
    patches(&from, n[15], n[16], address(n[17]));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* It is advice: where the system has no such pages, or has none left, nothing changes. */
PyObject *py_large_pages(PyObject *module, PyObject *bytes) {
    const int64_t *n = numbers(bytes, 2);
    (void)module;
    if (!n) return NULL;
#ifdef MADV_HUGEPAGE
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)n[0];
    const uintptr_t begin = (first + page - 1) / page * page, end = (first + (uintptr_t)n[1]) / page * page;
    if (begin < end) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#endif
    Py_RETURN_NONE;
}
