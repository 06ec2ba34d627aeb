/* What Python calls. Addresses and sizes are integers; cpu_kernels.py and layout_descriptors.py know what they mean. */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "form.h"
#include "narrow.h"
#include "module_attention.h"
#include "module_int8.h"

static const char FORM[] = "sdquant.kernels.cpu.Form";

static void release(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, FORM)); }

/* A table of float32: bytes, of no more than 256 entries, or none. 0: it is neither. */
static int table_of(PyObject *bytes, float *table, int *given) {
    char *from;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(bytes, &from, &size) < 0) return 0;
    if (size > 256 * (Py_ssize_t)sizeof *table) {
        PyErr_SetString(PyExc_ValueError, "a table of more than 256 entries");
        return 0;
    }
    memcpy(table, from, size);
    *given = size > 0;
    return 1;
}

PyDoc_STRVAR(form_doc,
             "form(rows, columns, group, taps, packing, scale, shift, arithmetic, zeros, added, fused, zero, factor, offset,\n"
             "     table, dynamic)\n--\n\n"
             "A form for the functions below; None where the kernels chosen cannot read it. Types are numbers: -1 none,\n"
             "0 float32, 1 bfloat16, 2 float16, 3 nested codes. Tables are bytes of float32, empty where there is none.");

static PyObject *py_form(PyObject *module, PyObject *args) {
    long long rows, columns, group, taps;
    const char *packing, *zeros;
    int scale, shift, arithmetic, added, fused, nested;
    float zero, factor, offset;
    PyObject *table, *dynamic;
    (void)module;
    if (!PyArg_ParseTuple(args, "LLLLsiiisppfffSS", &rows, &columns, &group, &taps, &packing, &scale, &shift, &arithmetic,
                          &zeros, &added, &fused, &zero, &factor, &offset, &table, &dynamic))
        return NULL;
    Form *form = calloc(1, sizeof *form);
    if (!form) return PyErr_NoMemory();
    form->rows = rows, form->columns = columns, form->group = group, form->taps = taps;
    form->scale = scale, form->shift = shift, form->arithmetic = arithmetic;
    form->added = added, form->fused = fused;
    form->zero = zero, form->factor = factor, form->offset = offset;
    if (!table_of(table, form->table, &form->looked_up) || !table_of(dynamic, form->dynamic, &nested)) {
        free(form);
        return NULL;
    }
    const int known = packing_of(packing);
    form->zeros = *zeros ? packing_of(zeros) : -1;
    form->packing = known;
    if (known == BYTES && form->looked_up) form->float8 = float8_of(form->table);
    if (known < 0 || rows < 1 || columns < 1 || group < 1 || taps < 1 ||
        taps > MOST_TAPS || group % taps || !kernels()->decoder(form)) {
        free(form);
        Py_RETURN_NONE;
    }
    return PyCapsule_New(form, FORM, release);
}

/* An integer argument; errors are looked for once, after all of them. */
static int64_t number(PyObject *value) { return PyLong_AsLongLong(value); }

static void *address(PyObject *value) { return (void *)(intptr_t)PyLong_AsLongLong(value); }

/* codes, scale, nested, zeros, shift. */
static Form *parts_of(PyObject *form, PyObject *const *args, Parts *parts) {
    parts->codes = address(args[0]);
    parts->scale = address(args[1]);
    parts->nested = address(args[2]);
    parts->zeros = address(args[3]);
    parts->shift = address(args[4]);
    parts->ahead = 0;
    parts->beside = NULL;
    return PyCapsule_GetPointer(form, FORM);
}

/* form, type, codes, scale, nested, zeros, shift: what both functions below begin with. */
enum { COMMON = 7 };

static Form *common(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, Parts *parts, Type *type) {
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arguments, and %zd are wanted", given, wanted);
        return NULL;
    }
    *type = (Type)number(args[1]);
    return parts_of(args[0], args + 2, parts);
}

typedef void Rows(const Form *form, Parts *parts, Type type, int64_t start, int64_t stop, void *out);

static PyObject *some_rows(PyObject *const *args, Py_ssize_t given, Rows *run) {
    Parts parts;
    Type type;
    const Form *form = common(args, given, COMMON + 3, &parts, &type);
    if (!form) return NULL;
    const int64_t start = number(args[7]), stop = number(args[8]);
    void *out = address(args[9]);
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    run(form, &parts, type, start, stop, out);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(decode_doc, "decode(form, type, codes, scale, nested, zeros, shift, start, stop, out)\n--\n\n"
                         "Rows start to stop, in the order of the kernels, into their places of `out`.");

static PyObject *py_decode(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    return some_rows(args, given, decode_rows);
}

PyDoc_STRVAR(part_doc, "part(form, type, codes, scale, nested, zeros, shift, start, stop, out)\n--\n\n"
                       "Rows start to stop, in their own order, into `out` [stop - start, columns].");

static PyObject *py_part(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    return some_rows(args, given, decode_part);
}

PyDoc_STRVAR(rounded_doc, "rounded(form, type, codes, scale, nested, zeros, shift, start, stop, out)\n--\n\n"
                          "As `part`, rounded to the type and as float32.");

static PyObject *py_rounded(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    return some_rows(args, given, decode_rounded);
}

PyDoc_STRVAR(product_doc, "product(form, type, codes, scale, nested, zeros, shift, start, stop, out, x, m, bias)\n--\n\n"
                          "Columns of `out` [m, rows] for rows start to stop, in the order of the kernels. bias [rows]: 0\n"
                          "for none.");

static PyObject *py_product(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    Parts parts;
    Type type;
    (void)module;
    const Form *form = common(args, given, COMMON + 6, &parts, &type);
    if (!form) return NULL;
    const int64_t start = number(args[7]), stop = number(args[8]), m = number(args[11]);
    void *out = address(args[9]);
    const void *x = address(args[10]), *bias = address(args[12]);
    int done;
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    done = product_rows(form, &parts, type, start, stop, x, m, bias, out);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(beside_doc, "product_beside(form, type, codes, scale, nested, zeros, shift, start, stop, out, x, m, bias, numbers)\n"
                        "--\n\nThe same with what is beside the weight: see narrow.h. False, and nothing is done, where\n"
                        "these kernels have no such product.");

static PyObject *py_product_beside(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    Parts parts;
    Type type;
    Beside beside;
    (void)module;
    const Form *form = common(args, given, COMMON + 7, &parts, &type);
    if (!form || !beside_of(args[13], type, form->columns, &beside)) return NULL;
    const int64_t start = number(args[7]), stop = number(args[8]), m = number(args[11]);
    void *out = address(args[9]);
    const void *x = address(args[10]), *bias = address(args[12]);
    const Kernels *use = kernels();
    int done;
    if (PyErr_Occurred()) return NULL;
    if (!use->beside || !(use->products >> type & 1)) Py_RETURN_FALSE;
    parts.beside = &beside;
    Py_BEGIN_ALLOW_THREADS
    done = use->product(form, &parts, type, start, stop, x, m, bias, out);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(quantize_doc, "quantize(type, x, stride, start, stop, k, codes, scales, sums)\n--\n\n"
                           "Rows start to stop of x [m, k], `stride` bytes apart: codes int8 [m, k], their float32\n"
                           "scales [m] and int32 sums [m].");

static PyObject *py_quantize(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    if (given != 9) return PyErr_Format(PyExc_TypeError, "%zd arguments, and 9 are wanted", given);
    const Type type = (Type)number(args[0]);
    const char *x = address(args[1]);
    const int64_t stride = number(args[2]), start = number(args[3]), stop = number(args[4]), k = number(args[5]);
    int8_t *codes = address(args[6]);
    float *scales = address(args[7]);
    int32_t *sums = address(args[8]);
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = start; i < stop; i++)
        kernels()->quantize(type, x + i * stride, k, codes + i * k, scales + i, sums + i);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(recode_doc, "recode(form, codes, scale, nested, zeros, shift, start, stop, row, to, scales)\n--\n\n"
                         "Rows start to stop of a packed weight, decoded to float32 and quantized: int8 codes to `to`\n"
                         "[rows, columns], float32 scales [rows]. `row`: room for a row in float32.");

static PyObject *py_recode(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    Parts parts;
    (void)module;
    if (given != 11) return PyErr_Format(PyExc_TypeError, "%zd arguments, and 11 are wanted", given);
    const Form *form = parts_of(args[0], args + 1, &parts);
    if (!form) return NULL;
    const int64_t start = number(args[6]), stop = number(args[7]);
    float *row = address(args[8]), *scales = address(args[10]);
    int8_t *to = address(args[9]);
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    recode_rows(form, &parts, start, stop, row, to, scales);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(finish_doc, "finish(totals, start, stop, n, sums, added, scales, weight_scales, bias, type, out, stride)\n--\n\n"
                         "Rows start to stop of int32 totals [m, n] to floats of `type`, rows of `out` `stride` bytes\n"
                         "apart: (total + sum * added) * scale * weight scale + bias. sums int32 [m], added int32 [n],\n"
                         "float32 scales [m] and [n], bias float32 [n]; 0 for no added and no bias.");

static PyObject *py_finish(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    if (given != 12) return PyErr_Format(PyExc_TypeError, "%zd arguments, and 12 are wanted", given);
    const int32_t *totals = address(args[0]), *sums = address(args[4]), *added = address(args[5]);
    const int64_t start = number(args[1]), stop = number(args[2]), n = number(args[3]), stride = number(args[11]);
    const float *scales = address(args[6]), *weight_scales = address(args[7]), *bias = address(args[8]);
    const Type type = (Type)number(args[9]);
    char *out = address(args[10]);
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = start; i < stop; i++)
        kernels()->finish(totals + i * n, sums[i], added, scales[i], weight_scales, bias, n, type, out + i * stride);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_isa(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyUnicode_FromString(kernels()->name);
}

PyDoc_STRVAR(unrounded_doc, "unrounded(form, type)\n--\n\n"
                            "Whether `product` with activations of a type has weights that are not rounded to it.");

static PyObject *py_unrounded(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    if (given != 2) return PyErr_Format(PyExc_TypeError, "%zd arguments, and 2 are wanted", given);
    const Form *form = PyCapsule_GetPointer(args[0], FORM);
    if (!form) return NULL;
    const Type type = (Type)number(args[1]);
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(kernels()->unrounded && kernels()->unrounded(form, type));
}

static PyObject *py_amd(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyBool_FromLong(amd());
}

static PyObject *py_choose(PyObject *module, PyObject *name) {
    (void)module;
    PyObject *bytes = PyUnicode_AsUTF8String(name);
    if (!bytes) return NULL;
    const int found = choose(PyBytes_AsString(bytes));
    Py_DECREF(bytes);
    return PyBool_FromLong(found);
}

static PyMethodDef METHODS[] = {
    {"form", py_form, METH_VARARGS, form_doc},
    {"decode", (PyCFunction)(void (*)(void))py_decode, METH_FASTCALL, decode_doc},
    {"part", (PyCFunction)(void (*)(void))py_part, METH_FASTCALL, part_doc},
    {"rounded", (PyCFunction)(void (*)(void))py_rounded, METH_FASTCALL, rounded_doc},
    {"product", (PyCFunction)(void (*)(void))py_product, METH_FASTCALL, product_doc},
    {"product_beside", (PyCFunction)(void (*)(void))py_product_beside, METH_FASTCALL, beside_doc},
    {"quantize", (PyCFunction)(void (*)(void))py_quantize, METH_FASTCALL, quantize_doc},
    {"recode", (PyCFunction)(void (*)(void))py_recode, METH_FASTCALL, recode_doc},
    {"finish", (PyCFunction)(void (*)(void))py_finish, METH_FASTCALL, finish_doc},
    {"isa", py_isa, METH_NOARGS, "isa()\n--\n\nName of the instruction set whose kernels run."},
    {"unrounded", (PyCFunction)(void (*)(void))py_unrounded, METH_FASTCALL, unrounded_doc},
    {"amd", py_amd, METH_NOARGS, "amd()\n--\n\nWhether the processor is AMD's."},
    {"choose", py_choose, METH_O,
     "choose(name)\n--\n\nRun the kernels of an instruction set, \"\" for the best; False where the machine lacks it.\n"
     "Forms that were made before stay with what they were checked against."},
    INT8_METHODS,
    ATTENTION_METHODS,
    {NULL, NULL, 0, NULL},
};

/* Raise it here and in __init__.py with any change of a function's arguments, of what they mean, or of what it returns: a
   module that was built before the change is then left alone. */
#define VERSION 8

static int add_constants(PyObject *module) { return PyModule_AddIntConstant(module, "VERSION", VERSION); }

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, (void *)add_constants}, {0, NULL}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_kernels", "Kernels for packed weights in C.", 0, METHODS, SLOTS, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&MODULE); }
