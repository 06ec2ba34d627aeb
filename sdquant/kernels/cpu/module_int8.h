/* The functions of module_int8.c, for the module's table. */
#ifndef SDQUANT_MODULE_INT8_H
#define SDQUANT_MODULE_INT8_H

PyObject *py_int8_sizes(PyObject *module, PyObject *columns);
PyObject *py_int8_lies_right(PyObject *module, PyObject *args);
PyObject *py_int8_stage(PyObject *module, PyObject *args);
PyObject *py_int8_largest(PyObject *module, PyObject *bytes);
PyObject *py_int8_codes(PyObject *module, PyObject *args);
PyObject *py_int8_numbers(PyObject *module, PyObject *args);
PyObject *py_int8_last(PyObject *module, PyObject *bytes);
PyObject *py_int8_quantize(PyObject *module, PyObject *bytes);
PyObject *py_int8_rows(PyObject *module, PyObject *bytes);
PyObject *py_int8_panels(PyObject *module, PyObject *args);
PyObject *py_rotate(PyObject *module, PyObject *bytes);
PyObject *py_rotate_within(PyObject *module, PyObject *bytes);
PyObject *py_code_within(PyObject *module, PyObject *bytes);
PyObject *py_expand(PyObject *module, PyObject *bytes);
PyObject *py_by_turns(PyObject *module, PyObject *bytes);
PyObject *py_branch_lay(PyObject *module, PyObject *bytes);
PyObject *py_branch(PyObject *module, PyObject *bytes);
PyObject *py_patches(PyObject *module, PyObject *bytes);
PyObject *py_large_pages(PyObject *module, PyObject *bytes);

/* From bytes of numbers: what divides, the reciprocals of that, and the branch. 0: they are others. */
int beside_of(PyObject *bytes, Type type, int64_t inputs, Beside *beside);

#define INT8_METHODS                                                                                     \
    {"int8_sizes", py_int8_sizes, METH_O,                                                                \
     "int8_sizes(columns)\n--\n\nBytes of a row of activations, of a panel and of the spare memory of a thread, rows\n" \
     "of a block and of a group, and which instructions; None where this machine has no such kernels."},                         \
    {"int8_lies_right", py_int8_lies_right, METH_VARARGS,                                                 \
     "int8_lies_right(form, numbers)\n--\n\nSee int8.h."},                                               \
    {"int8_stage", py_int8_stage, METH_VARARGS, "int8_stage(form, numbers)\n--\n\nSee int8.h."},          \
    {"int8_largest", py_int8_largest, METH_O, "int8_largest(numbers)\n--\n\nSee int8.h."},                \
    {"int8_codes", py_int8_codes, METH_VARARGS,                                                          \
     "int8_codes(bound, low, high, known, numbers)\n--\n\nSee int8.h."},                                \
    {"int8_numbers", py_int8_numbers, METH_VARARGS,                                                      \
     "int8_numbers(bound, low, high, kind, decoded, numbers)\n--\n\nSee int8.h."},                      \
    {"int8_last", py_int8_last, METH_O, "int8_last(numbers)\n--\n\nSee int8.h."},                      \
    {"int8_quantize", py_int8_quantize, METH_O, "int8_quantize(numbers)\n--\n\nSee int8.h."},             \
    {"int8_rows", py_int8_rows, METH_VARARGS, "int8_rows(form, numbers)\n--\n\nSee int8.h."},                         \
    {"int8_panels", py_int8_panels, METH_VARARGS, "int8_panels(form, numbers)\n--\n\nSee int8.h."},   \
    {"rotate", py_rotate, METH_O, "rotate(numbers)\n--\n\nSee rotate_rows in rotate.h."},           \
    {"rotate_within", py_rotate_within, METH_O,                                                     \
     "rotate_within(numbers)\n--\n\nSee rotate_rows_within in rotate.h."},                          \
    {"code_within", py_code_within, METH_O,                                                         \
     "code_within(numbers)\n--\n\nSee code_rows_within in rotate.h."},                              \
    {"expand", py_expand, METH_O, "expand(numbers)\n--\n\nSee expand_rows in expand.h."},           \
    {"by_turns", py_by_turns, METH_O, "by_turns(numbers)\n--\n\nSee turns_of_scales in by_turns.h."},  \
    {"branch_lay", py_branch_lay, METH_O,                                                           \
     "branch_lay(numbers)\n--\n\nSee narrow.h. Whether these kernels have its type."},             \
    {"branch", py_branch, METH_O, "branch(numbers)\n--\n\nSee narrow.h."},                         \
    {"patches", py_patches, METH_O, "patches(numbers)\n--\n\nSee patches.h."},                        \
    {"large_pages", py_large_pages, METH_O,                                                             \
     "large_pages(numbers)\n--\n\nAsk for pages of 2 MB for memory that is not used yet; see kernels/workspace.py."}

#endif
