/* What Python calls. Addresses and sizes are integers; __init__.py and reader.py know what they mean. */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "form.h"
#include "module_int8.h"

static const char FORM[] = "sdquant.kernels.native.Form";

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
             "form(rows, columns, group, packing, scale, shift, arithmetic, zeros, added, fused, zero, factor, offset,\n"
             "     table, dynamic)\n--\n\n"
             "A form for the functions below; None where the kernels chosen cannot read it. Types are numbers: -1 none,\n"
             "0 float32, 1 bfloat16, 2 float16, 3 nested codes. Tables are bytes of float32, empty where there is none.");

static PyObject *py_form(PyObject *module, PyObject *args) {
    long long rows, columns, group;
    const char *packing, *zeros;
    int scale, shift, arithmetic, added, fused, nested;
    float zero, factor, offset;
    PyObject *table, *dynamic;
    (void)module;
    if (!PyArg_ParseTuple(args, "LLLsiiisppfffSS", &rows, &columns, &group, &packing, &scale, &shift, &arithmetic,
                          &zeros, &added, &fused, &zero, &factor, &offset, &table, &dynamic))
        return NULL;
    Form *form = calloc(1, sizeof *form);
    if (!form) return PyErr_NoMemory();
    form->rows = rows, form->columns = columns, form->group = group;
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
    if (known < 0 || rows < 1 || columns < 1 || group < 1 || !kernels()->decoder(form)) {
        free(form);
        Py_RETURN_NONE;
    }
    return PyCapsule_New(form, FORM, release);
}

/* An integer argument; errors are looked for once, after all of them. */
static int64_t number(PyObject *value) { return PyLong_AsLongLong(value); }

/* form, type, codes, scale, nested, zeros, shift: what both functions below begin with. */
enum { COMMON = 7 };

static Form *common(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, Parts *parts, Type *type) {
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arguments, and %zd are wanted", given, wanted);
        return NULL;
    }
    *type = (Type)number(args[1]);
    parts->codes = (const uint8_t *)(intptr_t)number(args[2]);
    parts->scale = (const void *)(intptr_t)number(args[3]);
    parts->nested = (const float *)(intptr_t)number(args[4]);
    parts->zeros = (const uint8_t *)(intptr_t)number(args[5]);
    parts->shift = (const void *)(intptr_t)number(args[6]);
    return PyCapsule_GetPointer(args[0], FORM);
}

PyDoc_STRVAR(decode_doc, "decode(form, type, codes, scale, nested, zeros, shift, start, stop, out)\n--\n\n"
                         "Rows start to stop, in the order of the kernels, into their places of `out`.");

static PyObject *py_decode(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    Parts parts;
    Type type;
    (void)module;
    const Form *form = common(args, given, COMMON + 3, &parts, &type);
    if (!form) return NULL;
    const int64_t start = number(args[7]), stop = number(args[8]);
    void *out = (void *)(intptr_t)number(args[9]);
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    decode_rows(form, &parts, type, start, stop, out);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(product_doc, "product(form, type, codes, scale, nested, zeros, shift, start, stop, out, x, m)\n--\n\n"
                          "Columns of `out` [m, rows] for rows start to stop, in the order of the kernels.");

static PyObject *py_product(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    Parts parts;
    Type type;
    (void)module;
    const Form *form = common(args, given, COMMON + 5, &parts, &type);
    if (!form) return NULL;
    const int64_t start = number(args[7]), stop = number(args[8]), m = number(args[11]);
    void *out = (void *)(intptr_t)number(args[9]);
    const void *x = (const void *)(intptr_t)number(args[10]);
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    product_rows(form, &parts, type, start, stop, x, m, out);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_isa(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyUnicode_FromString(kernels()->name);
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
    {"product", (PyCFunction)(void (*)(void))py_product, METH_FASTCALL, product_doc},
    {"isa", py_isa, METH_NOARGS, "isa()\n--\n\nName of the instruction set whose kernels run."},
    {"choose", py_choose, METH_O,
     "choose(name)\n--\n\nRun the kernels of an instruction set, \"\" for the best; False where the machine lacks it.\n"
     "Forms that were made before stay with what they were checked against."},
    INT8_METHODS,
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {{0, NULL}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_kernels", "Kernels for packed weights in C.", 0, METHODS, SLOTS, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&MODULE); }
